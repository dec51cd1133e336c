// Copies of matrices whose rows are not aligned to 16 bytes, for products of padded matrices.

#include "torchkiln/device/launch.cuh"
#include "torchkiln/kernels/matmul.h"

namespace torchkiln::cuda {

using namespace device;
namespace {

constexpr int kThreads = 256;
constexpr int kWordsInFlight = 8;  // loads per thread
constexpr int64_t kMaxGridY = 65535;

/// Copies rows word by word. Adjacent threads copy adjacent words, so both sides are accessed in
/// whole sectors at any alignment. Sizes and strides are in words.
template <class Word>
__global__ void __launch_bounds__(kThreads)
    copy_words(const Word* from, Word* to, int64_t from_stride, int64_t to_stride, int64_t rows,
               int64_t words, int64_t to_words) {
  wait_for_previous_kernel();
  const int64_t first = int64_t{blockIdx.x} * kThreads * kWordsInFlight + threadIdx.x;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    const Word* source = from + row * from_stride + first;
    Word* target = to + row * to_stride + first;
    Word values[kWordsInFlight];
#pragma unroll
    for (int i = 0; i < kWordsInFlight; ++i)
      values[i] = first + i * kThreads < words ? source[i * kThreads] : Word{0};
#pragma unroll
    for (int i = 0; i < kWordsInFlight; ++i)
      if (first + i * kThreads < to_words) target[i * kThreads] = values[i];
  }
}

template <class Word>
Status launch_copy(const CopyRows& p, cudaStream_t stream) {
  constexpr int64_t kElements = sizeof(Word) / sizeof(uint16_t);
  const int64_t blocks = ceil_div(p.to_columns / kElements, int64_t{kThreads} * kWordsInFlight);
  if (blocks > kMaxGridX) return {"too many columns for one launch"};
  const int64_t rows = p.rows < kMaxGridY ? p.rows : kMaxGridY;
  const Grid grid{dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(rows)), kThreads};
  return launch_overlapped(copy_words<Word>, grid, stream, static_cast<const Word*>(p.from),
                           static_cast<Word*>(p.to), p.from_stride / kElements,
                           p.to_stride / kElements, p.rows, p.columns / kElements,
                           p.to_columns / kElements);
}

}  // namespace

Status copy_rows(const CopyRows& p, cudaStream_t stream) {
  if (p.rows == 0 || p.to_columns == 0) return {};
  const int64_t sizes = p.from_stride | p.to_stride | p.columns | p.to_columns;
  const auto addresses = reinterpret_cast<uintptr_t>(p.from) | reinterpret_cast<uintptr_t>(p.to);
  const bool has_pairs = sizes % 2 == 0 && addresses % sizeof(uint32_t) == 0;
  return has_pairs ? launch_copy<uint32_t>(p, stream) : launch_copy<uint16_t>(p, stream);
}

}  // namespace torchkiln::cuda
