#pragma once

// The skeleton of column reductions over a [rows, columns] problem: what a bias or weight gradient
// is. One pass hands every element to a Body, which may write elementwise results on the way, and
// sums what the body returns down each column.
//
//   thread (tx, ty) of block (x, y) owns kLanes adjacent columns of tile x
//   and the rows  y * rows_per_pass + ty,  + gridDim.y * rows_per_pass, ...
//
// The sums stay in registers, are added over ty in shared memory, and leave as one partial row per
// block row ("chunk"). A second, short kernel adds the chunks. No atomics: the order of every
// addition is fixed by the shape and the device.

#include "torchkiln/launch.cuh"
#include "torchkiln/vec.cuh"

namespace torchkiln {
namespace columns {

inline constexpr int kThreads = 256;
// One warp along a row reads 512 bytes of it at a time; the block's other warps take other rows,
// whose sums meet in shared memory instead of in the partial sums.
inline constexpr int kMostThreadsX = 32;
// Fewer rows a thread, and the partial sums cost more than the parallelism gains.
inline constexpr int kFewestRows = 4;
// Two blocks of 256 threads with eight 16-byte loads in flight each keep 64 KiB on the way per
// multiprocessor; a third no longer fits into the registers and would run as a second wave.
inline constexpr int kBlocksPerMultiprocessor = 2;

/// How a [rows, columns] problem is cut. Depends on shape, vector width and device only.
struct Plan {
  int threads_x;   // threads along a row, a power of two
  int64_t tiles;   // blocks along a row
  int64_t chunks;  // blocks down the rows; each leaves one row of partial sums
  int64_t rows;
  int64_t columns;

  __host__ __device__ int threads_y() const { return kThreads / threads_x; }
};

inline Plan make_plan(int64_t rows, int64_t columns, int lanes) {
  Plan plan{1, 1, 1, rows, columns};
  const int64_t vectors = ceil_div(columns, lanes);
  while (plan.threads_x < kMostThreadsX && plan.threads_x < vectors) plan.threads_x *= 2;
  plan.tiles = ceil_div(vectors, plan.threads_x);
  const int64_t wanted = ceil_div(rows, int64_t{plan.threads_y()} * kFewestRows);
  const int64_t one_wave =
      int64_t{current_device().multiprocessors} * kBlocksPerMultiprocessor / plan.tiles;
  plan.chunks = wanted < one_wave ? wanted : one_wave;
  if (plan.chunks < 1) plan.chunks = 1;
  return plan;
}

/// Bytes of partial sums: none when a single chunk writes the result itself.
inline size_t partial_bytes(const Plan& plan, size_t size_of_sum) {
  return plan.chunks == 1 ? 0 : static_cast<size_t>(plan.chunks * plan.columns) * size_of_sum;
}

template <class C>
__device__ __forceinline__ void store_as(void* to, int64_t at, Dtype dtype, C value) {
  switch (dtype) {
    case Dtype::float32:
      static_cast<float*>(to)[at] = static_cast<float>(value);
      break;
    case Dtype::float64:
      static_cast<double*>(to)[at] = static_cast<double>(value);
      break;
    case Dtype::float16:
      static_cast<__half*>(to)[at] = __float2half_rn(static_cast<float>(value));
      break;
    default:
      static_cast<__nv_bfloat16*>(to)[at] = __float2bfloat16_rn(static_cast<float>(value));
  }
}

/// Body: `C` (type of the sums), `kLanes`, `kRowsInFlight`, `Item`;
///   Item load(row, column)                           reads kLanes elements
///   void consume(item, row, column, C (&sum)[kLanes])  writes what is elementwise, adds to the
///   sums
template <class Body>
__global__ void __launch_bounds__(kThreads)
    walk(Body body, Plan plan, typename Body::C* partial, void* out, Dtype dtype) {
  wait_for_previous_kernel();
  using C = typename Body::C;
  constexpr int kLanes = Body::kLanes;
  constexpr int kRows = Body::kRowsInFlight;
  const int tx = threadIdx.x % plan.threads_x;
  const int ty = threadIdx.x / plan.threads_x;
  const int64_t column = (int64_t{blockIdx.x} * plan.threads_x + tx) * kLanes;
  const int64_t step = int64_t{gridDim.y} * plan.threads_y();

  C sum[kLanes] = {};
  if (column < plan.columns) {
    int64_t row = int64_t{blockIdx.y} * plan.threads_y() + ty;
    for (; row + (kRows - 1) * step < plan.rows; row += kRows * step) {
      typename Body::Item items[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) items[r] = body.load(row + r * step, column);
#pragma unroll
      for (int r = 0; r < kRows; ++r) body.consume(items[r], row + r * step, column, sum);
    }
    for (; row < plan.rows; row += step) body.consume(body.load(row, column), row, column, sum);
  }

  __shared__ C shared[kThreads * kLanes];
  if (plan.threads_y() > 1) {
    // Halving over ty; neighbours in tx keep neighbouring words, so no two threads of a warp meet
    // in a bank.
    for (int half = plan.threads_y() / 2; half > 0; half /= 2) {
#pragma unroll
      for (int i = 0; i < kLanes; ++i) shared[i * kThreads + threadIdx.x] = sum[i];
      __syncthreads();
      if (ty < half) {
#pragma unroll
        for (int i = 0; i < kLanes; ++i)
          sum[i] += shared[i * kThreads + threadIdx.x + half * plan.threads_x];
      }
      __syncthreads();
    }
    if (ty > 0) return;
  }
#pragma unroll
  for (int i = 0; i < kLanes; ++i) {
    if (column + i >= plan.columns) break;
    if (plan.chunks == 1) {
      store_as(out, column + i, dtype, sum[i]);
    } else {
      partial[blockIdx.y * plan.columns + column + i] = sum[i];
    }
  }
}

inline constexpr int kFinishColumns = 32;

/// out[column] = sum of the chunks: a warp reads 32 neighbouring columns, the warps of the block
/// share the chunks.
template <class C>
__global__ void __launch_bounds__(kThreads)
    finish(const C* partial, Plan plan, void* out, Dtype dtype) {
  constexpr int kWarps = kThreads / kFinishColumns;
  const int lane = threadIdx.x % kFinishColumns;
  const int warp = threadIdx.x / kFinishColumns;
  const int64_t column = int64_t{blockIdx.x} * kFinishColumns + lane;
  C sum = 0;
  wait_for_previous_kernel();
  if (column < plan.columns) {
#pragma unroll 4
    for (int64_t chunk = warp; chunk < plan.chunks; chunk += kWarps)
      sum += partial[chunk * plan.columns + column];
  }
  __shared__ C shared[kWarps][kFinishColumns];
  shared[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || column >= plan.columns) return;
#pragma unroll
  for (int w = 1; w < kWarps; ++w) sum += shared[w][lane];
  store_as(out, column, dtype, sum);
}

/// Runs the body over the whole problem; the column sums arrive in `out`, as `dtype`.
template <class Body>
Status launch(const Body& body, const Plan& plan, void* workspace, void* out, Dtype dtype,
              cudaStream_t stream) {
  using C = typename Body::C;
  if (plan.tiles > kMaxGridX) return {"too many columns for one launch"};
  C* partial = static_cast<C*>(workspace);
  const dim3 grid(static_cast<unsigned>(plan.tiles), static_cast<unsigned>(plan.chunks));
  const Status status =
      launch_overlapped(walk<Body>, grid, kThreads, stream, body, plan, partial, out, dtype);
  if (!status.ok() || plan.chunks == 1) return status;
  const dim3 blocks(static_cast<unsigned>(ceil_div(plan.columns, kFinishColumns)));
  return launch_overlapped(finish<C>, blocks, kThreads, stream, partial, plan, out, dtype);
}

}  // namespace columns
}  // namespace torchkiln
