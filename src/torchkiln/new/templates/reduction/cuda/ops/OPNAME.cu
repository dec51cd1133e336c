#include "PACKAGE/kernels/OPNAME.h"

#include "torchkiln/device/alignment.h"
#include "torchkiln/device/block_reduce.cuh"
#include "torchkiln/device/elementwise.cuh"
#include "torchkiln/device/launch.cuh"

namespace PACKAGE::cuda {

using namespace torchkiln;
using namespace torchkiln::device;
using OPNAME_parts::Gradient;
using OPNAME_parts::Rows;
using OPNAME_parts::Term;

namespace {

constexpr int kThreads = 256;
// A warp sums rows of up to 8 KiB: 16 vectors of 16 bytes per lane. A block sums longer ones.
constexpr int64_t kWarpRowBytes = 16 * 16 * kWarpLanes;

/// kTeam threads, a warp or the block, sum a row in vectors of kLanes elements. The order of the
/// additions depends only on the length of the row, so results are bitwise reproducible.
template <class T, int kTeam, int kLanes>
__global__ void __launch_bounds__(kThreads)
    sum_rows(const T* x, T* out, int64_t rows, int64_t columns) {
  using C = Compute<T>;
  wait_for_previous_kernel();
  const int rank = threadIdx.x % kTeam;
  const int64_t row = int64_t{blockIdx.x} * (kThreads / kTeam) + threadIdx.x / kTeam;
  if (row >= rows) return;  // the same for all threads of a team
  const T* from = x + row * columns;
  C sums[kLanes] = {};
#pragma unroll 4
  for (int64_t at = int64_t{rank} * kLanes; at < columns; at += int64_t{kTeam} * kLanes) {
    C lanes[kLanes];
    widen(load_vector<kLanes>(from + at), lanes);
#pragma unroll
    for (int i = 0; i < kLanes; ++i) sums[i] += Term{}(lanes[i]);
  }
  C sum = 0;
#pragma unroll
  for (int i = 0; i < kLanes; ++i) sum += sums[i];
  if constexpr (kTeam == kWarpLanes) {
    sum = reduce_warp(sum);
  } else {
    sum = reduce_block(sum);
  }
  if (rank == 0) out[row] = convert<T>(sum);
}

template <class T, int kTeam, int kLanes>
Status launch_rows(const Rows& arguments, CUstream_st* stream) {
  const int64_t blocks = ceil_div(arguments.rows, kThreads / kTeam);
  if (blocks > kMaxGridX) return {"too many rows for one launch"};
  const Grid grid{dim3(static_cast<unsigned>(blocks)), kThreads};
  return launch_overlapped(sum_rows<T, kTeam, kLanes>, grid, stream,
                           static_cast<const T*>(arguments.x), static_cast<T*>(arguments.out),
                           arguments.rows, arguments.columns);
}

}  // namespace

Status OPNAME(const Rows& arguments, CUstream_st* stream) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;  // float, double, __half or __nv_bfloat16
    constexpr int kLanes = kVectorLanes<T>;
    const bool in_vectors = rows_in_vectors(arguments.x, kLanes, {arguments.columns});
    const bool is_short = arguments.columns * int64_t{sizeof(T)} <= kWarpRowBytes;
    if (in_vectors)
      return is_short ? launch_rows<T, kWarpLanes, kLanes>(arguments, stream)
                      : launch_rows<T, kThreads, kLanes>(arguments, stream);
    return is_short ? launch_rows<T, kWarpLanes, 1>(arguments, stream)
                    : launch_rows<T, kThreads, 1>(arguments, stream);
  });
}

Status OPNAME_backward(const Elementwise<2>& arguments, CUstream_st* stream) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return elementwise::launch<T, T, T>(Gradient{}, arguments, stream);
  });
}

}  // namespace PACKAGE::cuda
