// The mask that hides the keys after each token in attention over a cache: 0 up to the place of the
// token, else -infinity.

#include "ops/rope/angles.cuh"
#include "torchkiln/device/launch.cuh"

namespace torchkiln::cuda {
namespace {

constexpr int kMaskThreads = 256;

/// Writes a part of the mask of one token, per block.
template <class T, int kLanes>
__global__ void __launch_bounds__(kMaskThreads)
    cache_mask_parts(const CacheMask p, int64_t blocks_per_token) {
  wait_for_previous_kernel();
  const int64_t index = blockIdx.x / blocks_per_token;
  const int64_t part = blockIdx.x - index * blocks_per_token;
  const int64_t first = (part * kMaskThreads + threadIdx.x) * kLanes;
  if (first >= p.length) return;
  const int64_t batch = index / p.tokens;
  const int64_t last = row_of(p.places, batch, index - batch * p.tokens);
  Vec<T, kLanes> numbers;
#pragma unroll
  for (int i = 0; i < kLanes; ++i) numbers.lane[i] = T(first + i <= last ? 0.0f : -INFINITY);
  *reinterpret_cast<Vec<T, kLanes>*>(static_cast<T*>(p.out) + index * p.length + first) = numbers;
}

}  // namespace

Status cache_mask(const CacheMask& p, CUstream_st* stream) {
  if (p.batch * p.tokens * p.length == 0) return {};
  return dispatch_floating(p.dtype, [&](auto tag) -> Status {
    using T = typename decltype(tag)::type;
    const auto launch = [&](auto lanes) -> Status {
      const int64_t blocks_per_token = ceil_div(p.length, kMaskThreads * lanes);
      const int64_t blocks = p.batch * p.tokens * blocks_per_token;
      if (blocks > kMaxGridX) return {"a mask has too many elements for one launch"};
      const Grid grid{dim3(static_cast<unsigned>(blocks)), dim3(kMaskThreads)};
      return launch_overlapped(cache_mask_parts<T, lanes>, grid, stream, p, blocks_per_token);
    };
    return rows_in_vectors(p.out, kVectorLanes<T>, {p.length})
               ? launch(std::integral_constant<int, kVectorLanes<T>>{})
               : launch(std::integral_constant<int, 1>{});
  });
}

}  // namespace torchkiln::cuda
