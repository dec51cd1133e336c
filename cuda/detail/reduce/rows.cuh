#pragma once

// Skeleton of row sums: one result per row. A full sum is the sum of one row.
//
//   packed          rows of up to 32 vectors: a row takes as many lanes of a warp as it has vectors
//   staged          short rows, with small gaps or none, that are not whole vectors: a block copies
//                   many of them to shared memory in vectors, and sums them there
//   warp_per_row,   longer rows. If several blocks share a row, each writes a partial sum for a
//   block_per_row   second, short kernel
//
// A thread sums in type C, a block in float64. With an H200-sized grid a thread adds fewer than
// 2^24 elements, so float counts ones exactly. There are no atomics: shape, alignment and device
// fix the order of every addition.

#include "detail/reduce/row_kernels.cuh"

namespace torchkiln::reduce {
using namespace device;
namespace rows {

inline int power_of_two_from(int64_t least) {
  int power = 1;
  while (power < least) power *= 2;
  return power;
}

/// Queues `kernel` with `blocks` blocks.
template <class... Parameters, class... Arguments>
Status queue(void (*kernel)(Parameters...), int64_t blocks, int threads, cudaStream_t stream,
             const Arguments&... arguments) {
  if (blocks > kMaxGridX) return {"too many rows for one launch"};
  const Grid grid{dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(threads))};
  return launch_overlapped(kernel, grid, stream, arguments...);
}

/// Writes the sum of each row, divided by result.divisor, in the order of the grid [outer, inner].
template <class T, class C>
Status launch(const Shape& shape, const Plan& plan, Allocate allocate, const Result& result,
              cudaStream_t stream) {
  const int64_t count = shape.count();
  const Offsets begin(shape.outer, shape.inner, shape.outer_stride, shape.inner_stride);
  const Rows<T> rows{static_cast<const T*>(shape.in), begin, count, shape.length, shape.stride};
  const bool adjacent = shape.stride == 1;
  switch (plan.kind) {
    case Kind::packed_vectors: {
      const int team = power_of_two_from(shape.length / kVectorLanes<T>);
      const int64_t grid = ceil_div(count, int64_t{kThreads / team} * kPackedRows);
      return queue(packed<T, C, kVectorLanes<T>>, grid, plan.threads, stream, rows, team, result);
    }
    case Kind::packed_elements: {
      const int team = power_of_two_from(shape.length);
      const int64_t grid = ceil_div(count, int64_t{kThreads / team} * kPackedRows);
      return queue(packed<T, C, 1>, grid, plan.threads, stream, rows, team, result);
    }
    case Kind::staged: {
      const int64_t threads_per_row = kThreads / plan.tile;
      const int team = threads_per_row < 2 ? 1 : power_of_two_from(threads_per_row / 2 + 1);
      return queue(staged<T, C>, ceil_div(count, plan.tile), plan.threads, stream, rows,
                   static_cast<int>(plan.tile), static_cast<int>(shape.pitch()), team, result);
    }
    case Kind::warp_per_row: {
      const int64_t grid = ceil_div(count, kThreads / kWarpLanes);
      return adjacent ? queue(warp_per_row<T, C, true>, grid, plan.threads, stream, rows, result)
                      : queue(warp_per_row<T, C, false>, grid, plan.threads, stream, rows, result);
    }
    case Kind::block_per_row:
      break;
  }
  double* partial = static_cast<double*>(allocate(partial_bytes(shape, plan)));
  const int64_t grid = count * plan.parts;
  const Status status = adjacent ? queue(block_per_row<T, C, true>, grid, plan.threads, stream,
                                         rows, plan, partial, result)
                                 : queue(block_per_row<T, C, false>, grid, plan.threads, stream,
                                         rows, plan, partial, result);
  if (!status.ok() || plan.parts == 1) return status;
  return queue(finish<>, count, kThreads, stream, partial, plan.parts, result);
}

}  // namespace rows
}  // namespace torchkiln::reduce
