#pragma once

// Skeleton of column reductions over a [rows, columns] problem, such as bias and weight gradients.
// One pass gives every element to a Body, which may write elementwise results and adds to one sum
// per column.
//
//               tile 0          tile 1        ...      thread (tx, ty) of block (x, y) has kLanes
//            +--------------+--------------+--         adjacent columns of tile x and the rows
//   chunk 0  | block (0, 0) | block (1, 0) |             y * threads_y + ty, then every
//   chunk 1  | block (0, 1) | block (1, 1) |             chunks * threads_y-th row after it
//      ...   +--------------+--------------+--
//
// The sums stay in registers, are added over ty in shared memory, and are written as one row of
// partial sums per chunk. A second, short kernel adds the chunks in float64. There are no atomics:
// shape and device fix the order of every addition.

#include "detail/reduce/common.cuh"
#include "torchkiln/device/warp.cuh"

namespace torchkiln::reduce {
using namespace device;
namespace columns {

/// Calls body.begin(column, is_first, sum) if the body has such a function.
template <class Body, class Sums>
__device__ __forceinline__ auto begin(Body& body, int64_t column, bool is_first, Sums& sum, int)
    -> decltype(body.begin(column, is_first, sum)) {
  body.begin(column, is_first, sum);
}
template <class Body, class Sums>
__device__ __forceinline__ void begin(Body&, int64_t, bool, Sums&, long) {}

/// Body: `C` (type of the sums), `kLanes`, `kRowsInFlight`, `Item` and
///   Item load(row, column)                             reads kLanes elements
///   void consume(item, row, column, C (&sum)[kLanes])  writes elementwise results, adds to `sum`
/// and optionally
///   void begin(column, is_first, C (&sum)[kLanes])     called once per thread: reads operands that
///                                                      depend only on the column. is_first is true
///                                                      in one thread per column, to add elements
///                                                      that lie outside of the rows
template <class Body, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks)
    sum_columns(Body body, Plan plan, typename Body::C* partial, Result result) {
  wait_for_previous_kernel();
  using C = typename Body::C;
  constexpr int kLanes = Body::kLanes;
  constexpr int kRows = Body::kRowsInFlight;
  const int tx = threadIdx.x % plan.threads_x;
  const int ty = threadIdx.x / plan.threads_x;
  const int64_t column = (int64_t{blockIdx.x} * plan.threads_x + tx) * kLanes;
  const int64_t step = int64_t{gridDim.y} * plan.threads_y;

  C sum[kLanes] = {};
  if (column < plan.columns && ty < plan.threads_y) {
    int64_t row = int64_t{blockIdx.y} * plan.threads_y + ty;
    begin(body, column, row == 0, sum, 0);
    typename Body::Item items[kRows];
    for (; row + (kRows - 1) * step < plan.rows; row += kRows * step) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) items[r] = body.load(row + r * step, column);
      // Groups of kRows rows are summed first: the rounding error then grows with rows / kRows +
      // kRows instead of rows.
      C group[kLanes] = {};
#pragma unroll
      for (int r = 0; r < kRows; ++r) body.consume(items[r], row + r * step, column, group);
#pragma unroll
      for (int i = 0; i < kLanes; ++i) sum[i] += group[i];
    }
    // Fewer than kRows rows are left. Their loads are also issued before the first use.
#pragma unroll
    for (int r = 0; r < kRows - 1; ++r) {
      if (row + r * step < plan.rows) items[r] = body.load(row + r * step, column);
    }
#pragma unroll
    for (int r = 0; r < kRows - 1; ++r) {
      if (row + r * step < plan.rows) body.consume(items[r], row + r * step, column, sum);
    }
  }

  __shared__ C shared[kThreads * kLanes];
  // Adds the sums of all ty as a tree; with an odd number, the middle one is added in the next
  // step. Adjacent tx use adjacent words, so that no two threads of a warp conflict in a bank.
  for (int count = plan.threads_y; count > 1; count = (count + 1) / 2) {
    const int half = (count + 1) / 2;
#pragma unroll
    for (int i = 0; i < kLanes; ++i) shared[i * kThreads + threadIdx.x] = sum[i];
    __syncthreads();
    if (ty + half < count) {
#pragma unroll
      for (int i = 0; i < kLanes; ++i)
        sum[i] += shared[i * kThreads + threadIdx.x + half * plan.threads_x];
    }
    __syncthreads();
  }
  if (ty > 0) return;
#pragma unroll
  for (int i = 0; i < kLanes; ++i) {
    if (column + i >= plan.columns) break;
    if (plan.is_single_pass()) {
      result.store(column + i, sum[i]);
    } else {
      partial[blockIdx.y * plan.columns + column + i] = sum[i];
    }
  }
}

// 4 blocks per SM, and 9 loads in flight per thread, so that one step of loads has the partial sums
// of 132 blocks.
inline constexpr int kFinishThreads = 512;
inline constexpr int kFinishLoads = 9;
// Maximum number of threads per column: eight adjacent sums of float32 are a whole sector.
inline constexpr int kMostSharing = 64;

/// Adds the partial sums of all chunks and of all folded columns. `sharing` threads share the terms
/// of a column. With two rows of blocks, the grid finishes two results, and the partial sums of the
/// second result follow those of the first.
template <class C>
__global__ void __launch_bounds__(kFinishThreads)
    finish(const C* partial, Plan plan, int sharing, Result result, Result second) {
  const int thread = static_cast<int>(threadIdx.x);
  const int in_block = kFinishThreads / sharing;  // columns per block
  const int share = thread / in_block;
  const int64_t outputs = plan.columns / plan.fold;
  const int64_t output = int64_t{blockIdx.x} * in_block + thread % in_block;
  int64_t column = output;
  if (plan.fold > 1) column += output / plan.period * plan.period * (plan.fold - 1);
  const int terms = static_cast<int>(plan.chunks) * plan.fold;
  if (blockIdx.y == 1) {
    partial += plan.chunks * plan.columns;
    result = second;
  }
  double sum = 0;
  wait_for_previous_kernel();
  if (output < outputs) {
    for (int first = share; first < terms; first += kFinishLoads * sharing) {
      C values[kFinishLoads];
#pragma unroll
      for (int i = 0; i < kFinishLoads; ++i) {
        const int term = first + i * sharing;
        const int chunk = plan.fold == 1 ? term : term / plan.fold;
        const int64_t folded = term - chunk * plan.fold;
        values[i] =
            term < terms ? partial[chunk * plan.columns + column + folded * plan.period] : C(0);
      }
#pragma unroll
      for (int i = 0; i < kFinishLoads; ++i) sum += static_cast<double>(values[i]);
    }
  }
  __shared__ double shared[kFinishThreads];
  shared[thread] = sum;
  __syncthreads();
  if (share > 0 || output >= outputs) return;
  for (int s = 1; s < sharing; ++s) sum += shared[s * in_block + thread];
  result.store(output, sum);
}

/// Queues finish() for one or two results.
template <class C>
Status queue_finish(const C* partial, const Plan& plan, const Result& result, const Result* second,
                    cudaStream_t stream) {
  // Fewer threads share a column if there are fewer terms than one step of their loads.
  int sharing = kMostSharing;
  while (sharing > 1 && plan.chunks * plan.fold <= kFinishLoads * (sharing / 2)) sharing /= 2;
  const int in_block = kFinishThreads / sharing;
  const int64_t blocks = ceil_div(plan.columns / plan.fold, in_block);
  if (blocks > kMaxGridX) return {"too many columns for one launch"};
  const Grid grid{dim3(static_cast<unsigned>(blocks), second == nullptr ? 1 : 2), kFinishThreads};
  return launch_overlapped(finish<C>, grid, stream, partial, plan, sharing, result,
                           second == nullptr ? result : *second);
}

/// Runs the body over the whole problem. Writes the column sums, divided by `divisor`, to `out` as
/// `dtype`. The plan must have been made for kBlocks blocks per SM.
template <int kBlocks = kBlocksPerMultiprocessor, class Body>
Status launch(const Body& body, const Plan& plan, Allocate allocate, void* out, Dtype dtype,
              cudaStream_t stream, double divisor = 1) {
  using C = typename Body::C;
  if (plan.tiles > kMaxGridX) return {"too many columns for one launch"};
  C* partial = static_cast<C*>(allocate(partial_bytes(plan, sizeof(C))));
  const Result result{out, dtype, divisor};
  const dim3 blocks(static_cast<unsigned>(plan.tiles), static_cast<unsigned>(plan.chunks));
  const Status status = launch_overlapped(sum_columns<Body, kBlocks>, Grid{blocks, kThreads},
                                          stream, body, plan, partial, result);
  if (!status.ok() || plan.is_single_pass()) return status;
  return queue_finish(static_cast<const C*>(partial), plan, result, nullptr, stream);
}

/// Copies the gradient of one row of x, which is also that of a bias.
inline Status copy_row(void* to, const void* from, int64_t columns, Dtype dtype,
                       cudaStream_t stream) {
  return status_of(cudaMemcpyAsync(to, from, static_cast<size_t>(columns) * size_of(dtype),
                                   cudaMemcpyDeviceToDevice, stream));
}

}  // namespace columns
}  // namespace torchkiln::reduce
