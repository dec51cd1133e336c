#include "PACKAGE/kernels/OPNAME.h"

#include "torchkiln/device/launch.cuh"
#include "torchkiln/device/vec.cuh"

namespace PACKAGE::cuda {

using namespace torchkiln;
using namespace torchkiln::device;
using OPNAME_parts::Windows;

namespace {

constexpr int kThreads = 256;
constexpr int kItems = 8;  // per thread: 8 loads in flight
constexpr int kTile = kThreads * kItems;

/// A block computes a tile of kTile adjacent elements of a row. It first loads the kTile + window -
/// 1 elements that the tile needs into shared memory, each once. Neighbouring threads take
/// neighbouring elements, so global accesses are coalesced and shared ones have no bank conflicts.
template <class T>
__global__ void __launch_bounds__(kThreads) sum_windows(Windows windows, int64_t tiles) {
  using C = Compute<T>;
  extern __shared__ __align__(16) unsigned char memory[];
  C* const tile = reinterpret_cast<C*>(memory);
  wait_for_previous_kernel();
  const int64_t row = blockIdx.x / tiles;
  const int64_t begin = (blockIdx.x - row * tiles) * kTile;
  const int64_t at = row * windows.columns + begin;
  const T* const x = static_cast<const T*>(windows.x) + at - windows.before;
  T* const out = static_cast<T*>(windows.out) + at;
  const int64_t left = windows.columns - begin;  // in the row
  const int window = static_cast<int>(windows.window);
  const int needed = kTile + window - 1;
  // Slots first <= slot < last lie inside the row; the others are 0.
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
      if (slot < needed) tile[slot] = convert<C>(items[i]);
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
    if (slot < left) out[slot] = convert<T>(sums[i]);
  }
}

}  // namespace

Status OPNAME(const Windows& arguments, CUstream_st* stream) {
  return dispatch_floating(arguments.dtype, [&](auto tag) -> Status {
    using T = typename decltype(tag)::type;  // float, double, __half or __nv_bfloat16
    const int64_t tiles = ceil_div(arguments.columns, kTile);
    const int64_t blocks = arguments.rows * tiles;
    const int64_t bytes = (kTile + arguments.window - 1) * int64_t{sizeof(Compute<T>)};
    if (blocks > kMaxGridX) return {"too many elements for one launch"};
    if (bytes > current_device().shared_bytes)
      return {"window: a tile of a row does not fit into the shared memory of a block"};
    Grid grid{dim3(static_cast<unsigned>(blocks)), kThreads};
    grid.shared_bytes = static_cast<int>(bytes);
    return launch_overlapped(sum_windows<T>, grid, stream, arguments, tiles);
  });
}

}  // namespace PACKAGE::cuda
