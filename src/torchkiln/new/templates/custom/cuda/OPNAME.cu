#include "PACKAGE/kernels/OPNAME.h"

#include "torchkiln/launch.cuh"
#include "torchkiln/vec.cuh"

namespace PACKAGE::cuda {

using OPNAME_parts::Windows;
using torchkiln::Compute;
using torchkiln::Status;

namespace {

constexpr int kThreads = 256;

/// A block computes a tile of kThreads adjacent elements of a row, an element a thread. What the
/// tile needs of the row lies in shared memory: kThreads + window - 1 elements, read once.
template <class T>
__global__ void __launch_bounds__(kThreads) sum_windows(Windows windows, int64_t tiles) {
  using C = Compute<T>;
  extern __shared__ __align__(16) unsigned char memory[];
  C* const tile = reinterpret_cast<C*>(memory);
  torchkiln::wait_for_previous_kernel();
  const int64_t row = blockIdx.x / tiles;
  const int64_t begin = (blockIdx.x - row * tiles) * kThreads;
  const T* const x = static_cast<const T*>(windows.x) + row * windows.columns;
  T* const out = static_cast<T*>(windows.out) + row * windows.columns;
  const int needed = kThreads + static_cast<int>(windows.window) - 1;
  for (int i = threadIdx.x; i < needed; i += kThreads) {
    const int64_t at = begin - windows.before + i;
    tile[i] = 0 <= at && at < windows.columns ? torchkiln::convert<C>(x[at]) : C(0);
  }
  __syncthreads();
  C sum = 0;
  for (int k = 0; k < windows.window; ++k) sum += tile[threadIdx.x + k];
  const int64_t at = begin + threadIdx.x;
  if (at < windows.columns) out[at] = torchkiln::convert<T>(sum);
}

}  // namespace

Status OPNAME(const Windows& arguments, CUstream_st* stream) {
  return torchkiln::dispatch_floating(arguments.dtype, [&](auto tag) -> Status {
    using T = typename decltype(tag)::type;
    const int64_t tiles = torchkiln::ceil_div(arguments.columns, kThreads);
    const int64_t blocks = arguments.rows * tiles;
    const int64_t bytes =
        (kThreads + arguments.window - 1) * static_cast<int64_t>(sizeof(Compute<T>));
    if (blocks > torchkiln::kMaxGridX) return {"too many elements for one launch"};
    if (bytes > torchkiln::current_device().shared_bytes)
      return {"window: a tile of a row does not fit into the shared memory of a block"};
    torchkiln::Grid grid{dim3(static_cast<unsigned>(blocks)), kThreads};
    grid.shared_bytes = static_cast<int>(bytes);
    return torchkiln::launch_overlapped(sum_windows<T>, grid, stream, arguments, tiles);
  });
}

}  // namespace PACKAGE::cuda
