#include "PACKAGE/kernels/OPNAME.h"

#include "torchkiln/device/block_reduce.cuh"
#include "torchkiln/device/elementwise.cuh"
#include "torchkiln/device/launch.cuh"

namespace PACKAGE::cuda {

using OPNAME_parts::Gradient;
using OPNAME_parts::Rows;
using OPNAME_parts::Term;
using torchkiln::Compute;
using torchkiln::Elementwise;
using torchkiln::Status;

namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
// A warp's row is at most 16 vectors of each lane.
constexpr int64_t kWarpRowBytes = 16 * 16 * kWarp;

/// A team, which is a warp or the block, sums a row; its threads take vectors of kLanes elements in
/// turns. The order of the additions depends on the length of the row alone.
template <class T, int kTeam, int kLanes>
__global__ void __launch_bounds__(kThreads)
    sum_rows(const T* x, T* out, int64_t rows, int64_t columns) {
  using C = Compute<T>;
  torchkiln::device::wait_for_previous_kernel();
  const int rank = threadIdx.x % kTeam;
  const int64_t row = int64_t{blockIdx.x} * (kThreads / kTeam) + threadIdx.x / kTeam;
  if (row >= rows) return;  // the whole team
  const T* from = x + row * columns;
  C sums[kLanes] = {};
#pragma unroll 4
  for (int64_t at = int64_t{rank} * kLanes; at < columns; at += int64_t{kTeam} * kLanes) {
    C lanes[kLanes];
    torchkiln::device::widen(torchkiln::device::load_vector<kLanes>(from + at), lanes);
#pragma unroll
    for (int i = 0; i < kLanes; ++i) sums[i] += Term{}(lanes[i]);
  }
  C sum = 0;
#pragma unroll
  for (int i = 0; i < kLanes; ++i) sum += sums[i];
  if constexpr (kTeam == kWarp) {
    sum = torchkiln::device::reduce_warp(sum);
  } else {
    sum = torchkiln::device::reduce_block(sum);
  }
  if (rank == 0) out[row] = torchkiln::device::convert<T>(sum);
}

template <class T, int kTeam, int kLanes>
Status launch(const Rows& arguments, CUstream_st* stream) {
  const int64_t blocks = torchkiln::device::ceil_div(arguments.rows, kThreads / kTeam);
  if (blocks > torchkiln::device::kMaxGridX) return {"too many rows for one launch"};
  const torchkiln::device::Grid grid{dim3(static_cast<unsigned>(blocks)), kThreads};
  return torchkiln::device::launch_overlapped(
      sum_rows<T, kTeam, kLanes>, grid, stream, static_cast<const T*>(arguments.x),
      static_cast<T*>(arguments.out), arguments.rows, arguments.columns);
}

}  // namespace

Status OPNAME(const Rows& arguments, CUstream_st* stream) {
  return torchkiln::device::dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int kLanes = torchkiln::device::kVectorLanes<T>;
    // Every row then begins and ends where a vector does.
    const bool by_vectors =
        arguments.columns % kLanes == 0 && torchkiln::device::aligned(arguments.x, torchkiln::device::kVectorBytes);
    const bool is_short = arguments.columns * int64_t{sizeof(T)} <= kWarpRowBytes;
    if (by_vectors)
      return is_short ? launch<T, kWarp, kLanes>(arguments, stream)
                      : launch<T, kThreads, kLanes>(arguments, stream);
    return is_short ? launch<T, kWarp, 1>(arguments, stream)
                    : launch<T, kThreads, 1>(arguments, stream);
  });
}

Status OPNAME_backward(const Elementwise<2>& arguments, CUstream_st* stream) {
  return torchkiln::device::dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return torchkiln::device::elementwise::launch<T, T, T>(Gradient{}, arguments, stream);
  });
}

}  // namespace PACKAGE::cuda
