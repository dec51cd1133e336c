#include "PACKAGE/kernels/OPNAME.h"

#include "torchkiln/launch.cuh"
#include "torchkiln/vec.cuh"

namespace PACKAGE::cuda {

using OPNAME_parts::Windows;
using torchkiln::Compute;
using torchkiln::Status;

namespace {

constexpr int kThreads = 256;
constexpr int kItems = 8;  // of a thread: so many loads are on the way together
constexpr int kTile = kThreads * kItems;

/// A block computes a tile of kTile adjacent elements of a row. What the tile needs of the row lies
/// in shared memory: kTile + window - 1 elements, read once. Neighbouring threads take neighbouring
/// elements, so that neither memory is asked for the same bank or line twice.
template <class T>
__global__ void __launch_bounds__(kThreads) sum_windows(Windows windows, int64_t tiles) {
  using C = Compute<T>;
  extern __shared__ __align__(16) unsigned char memory[];
  C* const tile = reinterpret_cast<C*>(memory);
  torchkiln::wait_for_previous_kernel();
  const int64_t row = blockIdx.x / tiles;
  const int64_t begin = (blockIdx.x - row * tiles) * kTile;
  const T* const x = static_cast<const T*>(windows.x) + row * windows.columns;
  T* const out = static_cast<T*>(windows.out) + row * windows.columns;
  const int window = static_cast<int>(windows.window);
  const int needed = kTile + window - 1;
  for (int first = threadIdx.x; first < needed; first += kTile) {
    T items[kItems] = {};
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int slot = first + i * kThreads;
      const int64_t at = begin - windows.before + slot;
      if (slot < needed && 0 <= at && at < windows.columns) items[i] = x[at];
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int slot = first + i * kThreads;
      if (slot < needed) tile[slot] = torchkiln::convert<C>(items[i]);
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int slot = threadIdx.x + i * kThreads;
    const int64_t at = begin + slot;
    if (at >= windows.columns) return;
    C sum = 0;
    for (int k = 0; k < window; ++k) sum += tile[slot + k];
    out[at] = torchkiln::convert<T>(sum);
  }
}

}  // namespace

Status OPNAME(const Windows& arguments, CUstream_st* stream) {
  return torchkiln::dispatch_floating(arguments.dtype, [&](auto tag) -> Status {
    using T = typename decltype(tag)::type;
    const int64_t tiles = torchkiln::ceil_div(arguments.columns, kTile);
    const int64_t blocks = arguments.rows * tiles;
    const int64_t bytes = (kTile + arguments.window - 1) * int64_t{sizeof(Compute<T>)};
    if (blocks > torchkiln::kMaxGridX) return {"too many elements for one launch"};
    if (bytes > torchkiln::current_device().shared_bytes)
      return {"window: a tile of a row does not fit into the shared memory of a block"};
    torchkiln::Grid grid{dim3(static_cast<unsigned>(blocks)), kThreads};
    grid.shared_bytes = static_cast<int>(bytes);
    return torchkiln::launch_overlapped(sum_windows<T>, grid, stream, arguments, tiles);
  });
}

}  // namespace PACKAGE::cuda
