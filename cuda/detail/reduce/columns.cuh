#pragma once

// The skeleton of column reductions over a [rows, columns] problem: what a bias or weight gradient
// is. One pass hands every element to a Body, which may write elementwise results on the way, and
// sums what the body returns down each column.
//
//   thread (tx, ty) of block (x, y) owns kLanes adjacent columns of tile x
//   and the rows  y * threads_y + ty,  + gridDim.y * threads_y, ...
//
// The sums stay in registers, are added over ty in shared memory, and leave as one partial row per
// block row ("chunk"). A second, short kernel adds the chunks, in double. No atomics: the order of
// every addition is fixed by the shape and the device.

#include "detail/reduce/common.cuh"

namespace torchkiln::reduce {
using namespace device;
namespace columns {

inline constexpr int kThreads = 256;
// One warp along a row reads 512 bytes of it at a time; the block's other warps take other rows,
// whose sums meet in shared memory instead of in the partial sums.
inline constexpr int kThreadsX = 32;
// Of the narrower tiles for few rows: 128 bytes are a whole line of the cache.
inline constexpr int kFewestThreadsX = 8;
// Fewer rows a thread, and the partial sums cost more than the parallelism gains.
inline constexpr int kFewestRows = 4;
// Up to so many rows a thread, one block does them all: two or three rounds of loads take less time
// than a second kernel.
inline constexpr int kSinglePassRows = 16;
// Two blocks of 256 threads with eight 16-byte loads in flight each keep 64 KiB on the way per
// multiprocessor; a third no longer fits into the registers and would run as a second wave.
inline constexpr int kBlocksPerMultiprocessor = 2;

/// How a [rows, columns] problem is cut. Depends on shape, vector width and device only.
struct Plan {
  int threads_x;   // threads along a row
  int threads_y;   // rows that a block reads at a time; threads_x * threads_y <= kThreads
  int64_t tiles;   // blocks along a row
  int64_t chunks;  // blocks down the rows; each leaves one row of partial sums
  int64_t rows;
  int64_t columns;
  // Of a problem whose rows are `fold` shorter ones, one after the other: the sums of the columns
  // are folded, too. The `period` columns that are folded may repeat.
  int fold = 1;
  int64_t period = 0;

  __host__ __device__ bool is_single_pass() const { return chunks == 1 && fold == 1; }
};

inline Plan make_plan(int64_t rows, int64_t columns, int lanes,
                      int blocks_per_multiprocessor = kBlocksPerMultiprocessor) {
  Plan plan{1, 1, 1, 1, rows, columns};
  const int64_t wave = int64_t{current_device().multiprocessors} * blocks_per_multiprocessor;
  const int64_t vectors = ceil_div(columns, lanes);
  int64_t across = kThreadsX;
  // Few rows, and columns enough for every multiprocessor: all threads along the row, each with its
  // rows' loads in flight, and nothing meets in shared memory.
  while (across < kThreads && rows < kSinglePassRows * (kThreads / across) &&
         vectors >= 2 * across * wave) {
    across *= 2;
  }
  plan.tiles = across == kThreads ? ceil_div(vectors, across) : vectors / across;
  if (plan.tiles < 1) plan.tiles = 1;
  // Evenly: 33 vectors are one tile of 33 and not one of 32 beside an idle one.
  plan.threads_x = static_cast<int>(ceil_div(vectors, plan.tiles));
  plan.threads_y = kThreads / plan.threads_x;
  // Of so few rows one block would sum several a thread: narrower tiles have more multiprocessors
  // take part, each thread with fewer of them.
  while (rows > plan.threads_y && rows <= int64_t{plan.threads_y} * kSinglePassRows &&
         plan.threads_x >= 2 * kFewestThreadsX && plan.tiles * 2 <= wave) {
    plan.tiles *= 2;
    plan.threads_x = static_cast<int>(ceil_div(vectors, plan.tiles));
    plan.threads_y = kThreads / plan.threads_x;
  }
  if (rows > int64_t{plan.threads_y} * kSinglePassRows) {
    const int64_t most = ceil_div(rows, int64_t{plan.threads_y} * kFewestRows);
    plan.chunks = parts_that_fill(plan.tiles, most, wave);
  }
  return plan;
}

/// Bytes of partial sums: none when a single chunk writes the result itself.
inline size_t partial_bytes(const Plan& plan, size_t size_of_sum) {
  return plan.is_single_pass() ? 0 : static_cast<size_t>(plan.chunks * plan.columns) * size_of_sum;
}

/// Calls body.begin(column, is_first, sum) where the body has it.
template <class Body, class Sums>
__device__ __forceinline__ auto begin(Body& body, int64_t column, bool is_first, Sums& sum, int)
    -> decltype(body.begin(column, is_first, sum)) {
  body.begin(column, is_first, sum);
}
template <class Body, class Sums>
__device__ __forceinline__ void begin(Body&, int64_t, bool, Sums&, long) {}

/// Body: `C` (type of the sums), `kLanes`, `kRowsInFlight`, `Item`;
///   Item load(row, column)                             reads kLanes elements
///   void consume(item, row, column, C (&sum)[kLanes])  writes what is elementwise, adds to the
///                                                      sums
/// and, if it likes, begin(column, is_first, C (&sum)[kLanes]), which each thread calls once: to
/// find what depends on the column alone and, in one thread of each column, to add what lies
/// outside of the rows.
template <class Body, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks)
    walk(Body body, Plan plan, typename Body::C* partial, Result result) {
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
      // A group's sums first: the rounding error grows with rows / kRows + kRows.
      C group[kLanes] = {};
#pragma unroll
      for (int r = 0; r < kRows; ++r) body.consume(items[r], row + r * step, column, group);
#pragma unroll
      for (int i = 0; i < kLanes; ++i) sum[i] += group[i];
    }
    // The rest is fewer than kRows rows, whose loads are in flight together, too.
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
  // Halving over ty, the middle one of an odd number waits; neighbours in tx keep neighbouring
  // words, so no two threads of a warp meet in a bank.
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

inline constexpr int kFinishColumns = 32;
// Of a block that adds chunks: so many that each thread's few loads are on the way together.
inline constexpr int kFinishThreads = 1024;

/// The sums of the chunks, and of the folded columns: a warp reads 32 neighbouring columns, the
/// warps of the block share what is added. A grid of two rows finishes two results, the partial
/// sums of the second after those of the first.
template <class C>
__global__ void __launch_bounds__(kFinishThreads)
    finish(const C* partial, Plan plan, Result result, Result second) {
  constexpr int kWarps = kFinishThreads / kFinishColumns;
  const int lane = threadIdx.x % kFinishColumns;
  const int warp = threadIdx.x / kFinishColumns;
  const int64_t outputs = plan.columns / plan.fold;
  const int64_t output = int64_t{blockIdx.x} * kFinishColumns + lane;
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
#pragma unroll 8
    for (int term = warp; term < terms; term += kWarps) {
      const int chunk = term / plan.fold;
      const int folded = term - chunk * plan.fold;
      sum += static_cast<double>(partial[chunk * plan.columns + column + folded * plan.period]);
    }
  }
  __shared__ double shared[kWarps][kFinishColumns];
  shared[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || output >= outputs) return;
#pragma unroll
  for (int w = 1; w < kWarps; ++w) sum += shared[w][lane];
  result.store(output, sum);
}

/// Queues finish() for one result or two.
template <class C>
Status finish(const C* partial, const Plan& plan, const Result& result, const Result* second,
              cudaStream_t stream) {
  const int64_t blocks = ceil_div(plan.columns / plan.fold, kFinishColumns);
  if (blocks > kMaxGridX) return {"too many columns for one launch"};
  const Grid grid{dim3(static_cast<unsigned>(blocks), second == nullptr ? 1 : 2), kFinishThreads};
  void (*kernel)(const C*, Plan, Result, Result) = finish<C>;
  return launch_overlapped(kernel, grid, stream, partial, plan, result,
                           second == nullptr ? result : *second);
}

/// Runs the body over the whole problem; the column sums, divided, arrive in `out`, as `dtype`. The
/// plan was made for kBlocks blocks a multiprocessor.
template <int kBlocks = kBlocksPerMultiprocessor, class Body>
Status launch(const Body& body, const Plan& plan, Allocate allocate, void* out, Dtype dtype,
              cudaStream_t stream, double divisor = 1) {
  using C = typename Body::C;
  if (plan.tiles > kMaxGridX) return {"too many columns for one launch"};
  C* partial = static_cast<C*>(allocate(partial_bytes(plan, sizeof(C))));
  const Result result{out, dtype, divisor};
  const dim3 blocks(static_cast<unsigned>(plan.tiles), static_cast<unsigned>(plan.chunks));
  const Status status = launch_overlapped(walk<Body, kBlocks>, Grid{blocks, kThreads}, stream, body,
                                          plan, partial, result);
  if (!status.ok() || plan.is_single_pass()) return status;
  return finish(static_cast<const C*>(partial), plan, result, nullptr, stream);
}

}  // namespace columns
}  // namespace torchkiln::reduce
