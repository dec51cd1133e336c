#include "PACKAGE/kernels/OPNAME.h"

#include "torchkiln/device/launch.cuh"
#include "torchkiln/device/vec.cuh"

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
/// elements: whole lines of the one memory, and different banks of the other.
template <class T>
__global__ void __launch_bounds__(kThreads) sum_windows(Windows windows, int64_t tiles) {
  using C = Compute<T>;
  extern __shared__ __align__(16) unsigned char memory[];
  C* const tile = reinterpret_cast<C*>(memory);
  torchkiln::device::wait_for_previous_kernel();
  const int64_t row = blockIdx.x / tiles;
  const int64_t begin = (blockIdx.x - row * tiles) * kTile;
  const int64_t at = row * windows.columns + begin;
  const T* const x = static_cast<const T*>(windows.x) + at - windows.before;
  T* const out = static_cast<T*>(windows.out) + at;
  const int64_t left = windows.columns - begin;  // of the row
  const int window = static_cast<int>(windows.window);
  const int needed = kTile + window - 1;
  // What of the tile lies inside of the row: first <= slot < last.
  const int first = static_cast<int>(max(windows.before - begin, int64_t{0}));
  const int last = static_cast<int>(min(left + windows.before, int64_t{needed}));
  for (int base = threadIdx.x; base < needed; base += kTile) {
    T items[kItems] = {};
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int slot = base + i * kThreads;
      if (first <= slot && slot < last) items[i] = x[slot];
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int slot = base + i * kThreads;
      if (slot < needed) tile[slot] = torchkiln::device::convert<C>(items[i]);
    }
  }
  __syncthreads();
  C sums[kItems] = {};
  for (int k = 0; k < window; ++k) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) sums[i] += tile[threadIdx.x + i * kThreads + k];
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int slot = threadIdx.x + i * kThreads;
    if (slot < left) out[slot] = torchkiln::device::convert<T>(sums[i]);
  }
}

}  // namespace

Status OPNAME(const Windows& arguments, CUstream_st* stream) {
  return torchkiln::device::dispatch_floating(arguments.dtype, [&](auto tag) -> Status {
    using T = typename decltype(tag)::type;
    const int64_t tiles = torchkiln::device::ceil_div(arguments.columns, kTile);
    const int64_t blocks = arguments.rows * tiles;
    const int64_t bytes = (kTile + arguments.window - 1) * int64_t{sizeof(Compute<T>)};
    if (blocks > torchkiln::device::kMaxGridX) return {"too many elements for one launch"};
    if (bytes > torchkiln::device::current_device().shared_bytes)
      return {"window: a tile of a row does not fit into the shared memory of a block"};
    torchkiln::device::Grid grid{dim3(static_cast<unsigned>(blocks)), kThreads};
    grid.shared_bytes = static_cast<int>(bytes);
    return torchkiln::device::launch_overlapped(sum_windows<T>, grid, stream, arguments, tiles);
  });
}

}  // namespace PACKAGE::cuda
