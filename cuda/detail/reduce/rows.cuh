#pragma once

// The skeleton of row sums: one number for each row of elements. A full sum is the sum of one row.
//
//   packed  rows of up to 32 vectors: as many lanes of a warp as a row has vectors
//   staged  short rows without gaps that vectors do not fit: a block copies many of them into
//           shared memory by vectors, and sums them there
//   teams   longer rows: a warp each, or a block each, or several blocks each, which leave partial
//           sums for a second, short kernel
//
// A thread's sums are of type C; what blocks sum is double. A thread of H200's size of grid adds
// fewer than 2^24 elements, so that float counts exactly. No atomics: the order of every addition
// is fixed by the shape, the alignment and the device.

#include <cub/block/block_reduce.cuh>

#include "detail/reduce/common.cuh"
#include "detail/reduce/row_loads.cuh"

namespace torchkiln::reduce {
using namespace device;
namespace rows {

inline constexpr int kThreads = 256;
// Blocks of a wave: with kLoads 16-byte loads each, 4 * 256 threads keep 128 KiB on the way per
// multiprocessor, of which a third would do.
inline constexpr int kBlocksPerMultiprocessor = 4;
// Rows that a lane of a packed row has on the way.
inline constexpr int kPackedRows = 8;
inline constexpr int kTileBytes = 16 * 1024;
// A row that at least 16 of 256 threads sum.
inline constexpr int kStagedRowBytes = kTileBytes / 16;
// A warp's row is at most 32 vectors of each lane.
inline constexpr int kWarpRowBytes = 16 * 1024;
// A row of less is one vector of each second thread of a block.
inline constexpr int kBlockRowBytes = 2 * 1024;
// Up to here one block is faster than several and a second kernel; beyond, a part has so many
// bytes.
inline constexpr int64_t kSinglePassBytes = 64 * 1024;
inline constexpr int64_t kFewestPartBytes = 16 * 1024;

/// Rows of `length` elements, each `stride` after the other.
template <class T>
struct Rows {
  const T* in;
  Offsets begin;
  int64_t count;
  int64_t length;
  int64_t stride;
};

enum class Kind { packed_vectors, packed, staged, warps, blocks };

/// How rows are summed. Depends on shape, strides, alignment and device only.
struct Plan {
  Kind kind;
  int64_t parts = 1;  // of each row
  int64_t part_length = 0;
};

/// A [outer, inner] grid of rows, `in` with a stride along each.
struct Shape {
  const void* in;
  int64_t size_of_element;
  int64_t outer;
  int64_t inner;
  int64_t length;
  int64_t outer_stride;
  int64_t inner_stride;
  int64_t stride;

  int64_t count() const { return outer * inner; }

  /// Whether every row begins and ends where a vector does.
  bool by_vectors() const {
    const int64_t lanes = kVectorBytes / size_of_element;
    return stride == 1 && length % lanes == 0 && aligned(in, kVectorBytes) &&
           (outer == 1 || outer_stride % lanes == 0) && (inner == 1 || inner_stride % lanes == 0);
  }

  /// Whether each row begins where the one before it ends.
  bool is_dense() const {
    return stride == 1 &&
           ((inner == 1 && outer_stride == length) || (outer == 1 && inner_stride == length));
  }
};

inline Plan make_plan(const Shape& shape) {
  const int64_t bytes = shape.length * shape.size_of_element;
  // Eight rows a lane leave multiprocessors idle where rows are few.
  const bool packs = shape.by_vectors() && bytes <= kWarpLanes * kVectorBytes;
  const bool many = shape.count() >= int64_t{current_device().multiprocessors} * kPackedRows * 8;
  if (packs && (many || !shape.is_dense())) return {Kind::packed_vectors};
  if (shape.is_dense() && bytes <= kStagedRowBytes) return {Kind::staged};
  if (shape.length <= kWarpLanes) return {Kind::packed};
  const int64_t multiprocessors = current_device().multiprocessors;
  const bool warps_fill = shape.count() >= multiprocessors * 32;
  if (bytes <= kBlockRowBytes || (warps_fill && bytes <= kWarpRowBytes)) return {Kind::warps};
  Plan plan{Kind::blocks, 1, shape.length};
  if (bytes <= kSinglePassBytes) return plan;
  plan.parts = parts_that_fill(shape.count(), ceil_div(bytes, kFewestPartBytes),
                               multiprocessors * kBlocksPerMultiprocessor);
  if (plan.parts == 1) return plan;
  constexpr int64_t kMultiple = 256;  // parts of a row that begins at a vector do so, too
  plan.part_length = ceil_div(ceil_div(shape.length, plan.parts), kMultiple) * kMultiple;
  plan.parts = ceil_div(shape.length, plan.part_length);
  return plan;
}

inline size_t partial_bytes(const Shape& shape, const Plan& plan) {
  return plan.parts == 1 ? 0 : static_cast<size_t>(shape.count() * plan.parts) * sizeof(double);
}

/// `team` lanes, a power of two, sum a row of at most `team` vectors of kLanes elements.
template <class T, class C, int kLanes>
__global__ void __launch_bounds__(kThreads) packed(Rows<T> rows, int team, Result result) {
  wait_for_previous_kernel();
  const int rank = threadIdx.x % team;
  const int teams = kThreads / team;
  const int64_t first = int64_t{blockIdx.x} * teams * kPackedRows + threadIdx.x / team;
  const T* in = rows.in + rank * kLanes * rows.stride;
  const bool inside = rank * kLanes < rows.length;
  Vec<T, kLanes> items[kPackedRows];
#pragma unroll
  for (int r = 0; r < kPackedRows; ++r) {
    const int64_t row = first + r * teams;
    items[r] = {};
    if (inside && row < rows.count) items[r] = load_vector<kLanes>(in + rows.begin(row));
  }
#pragma unroll
  for (int r = 0; r < kPackedRows; ++r) {
    C lanes[kLanes];
#pragma unroll
    for (int i = 0; i < kLanes; ++i) lanes[i] = widened<C>(items[r].lane[i]);
    const C sum = reduce_warp(tree_sum(lanes), Sum{}, team);
    const int64_t row = first + r * teams;
    if (rank == 0 && row < rows.count) result.store(row, sum);
  }
}

/// A block copies `tile` rows, which follow one another, and lets `team` lanes sum each.
template <class T, class C>
__global__ void __launch_bounds__(kThreads)
    staged(Rows<T> rows, int tile, int team, Result result) {
  constexpr int kLanes = kVectorLanes<T>;
  alignas(kVectorBytes) __shared__ unsigned char memory[kTileBytes + kVectorBytes];
  wait_for_previous_kernel();
  const int length = static_cast<int>(rows.length);
  const int64_t first = int64_t{blockIdx.x} * tile;
  const int count = static_cast<int>(min(int64_t{tile}, rows.count - first));
  const T* from = rows.in + first * length;
  // As far past a 16-byte boundary as `from`, so that vectors go from boundary to boundary.
  const int past = static_cast<int>(reinterpret_cast<uintptr_t>(from) / sizeof(T) % kLanes);
  T* to = reinterpret_cast<T*>(memory) + past;
  const int elements = count * length;
  const int head = min(elements, (kLanes - past) % kLanes);
  const int vectors = (elements - head) / kLanes;
  const int tail = head + vectors * kLanes;
  constexpr int kVectors = kTileBytes / kVectorBytes / kThreads;
  Vec<T, kLanes> items[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int at = k * kThreads + static_cast<int>(threadIdx.x);
    if (at < vectors) items[k] = load_vector<kLanes>(from + head + at * kLanes);
  }
  const int edge = static_cast<int>(threadIdx.x);
  if (edge < head) to[edge] = from[edge];
  if (edge < elements - tail) to[tail + edge] = from[tail + edge];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int at = k * kThreads + static_cast<int>(threadIdx.x);
    if (at < vectors) *reinterpret_cast<Vec<T, kLanes>*>(to + head + at * kLanes) = items[k];
  }
  __syncthreads();

  const int rank = threadIdx.x % team;
  // The whole block stays in the loop: reduce_warp wants all lanes.
  for (int base = 0; base < count; base += kThreads / team) {
    const int row = base + static_cast<int>(threadIdx.x) / team;
    C sum = 0;
    if (row < count) {
#pragma unroll 4
      for (int i = rank; i < length; i += team) sum += widened<C>(to[row * length + i]);
    }
    sum = reduce_warp(sum, Sum{}, team);
    if (rank == 0 && row < count) result.store(first + row, sum);
  }
}

/// Half precision summed in double is the one case that takes more registers.
template <class T, class C>
inline constexpr int kBlocksThatFit = sizeof(C) > sizeof(Compute<T>) ? kBlocksPerMultiprocessor / 2
                                                                     : kBlocksPerMultiprocessor;

/// A warp sums each row.
template <class T, class C, bool kAdjacent>
__global__ void __launch_bounds__(kThreads, kBlocksThatFit<T, C>)
    warps(Rows<T> rows, Result result) {
  wait_for_previous_kernel();
  const int rank = threadIdx.x % kWarpLanes;
  const int64_t row = int64_t{blockIdx.x} * (kThreads / kWarpLanes) + threadIdx.x / kWarpLanes;
  if (row >= rows.count) return;
  const T* from = rows.in + rows.begin(row);
  const C sum = share<C, T, kAdjacent>(from, rows.stride, rows.length, rank, kWarpLanes);
  const C total = reduce_warp(sum);
  if (rank == 0) result.store(row, total);
}

using BlockSum = cub::BlockReduce<double, kThreads>;

/// A block sums each row or, when there are several, each part of a row.
template <class T, class C, bool kAdjacent>
__global__ void __launch_bounds__(kThreads, kBlocksThatFit<T, C>)
    blocks(Rows<T> rows, Plan plan, double* partial, Result result) {
  wait_for_previous_kernel();
  const int64_t row = plan.parts == 1 ? blockIdx.x : blockIdx.x / plan.parts;
  const int64_t begin = (blockIdx.x - row * plan.parts) * plan.part_length;
  const int64_t length = min(plan.part_length, rows.length - begin);
  const T* from = rows.in + rows.begin(row) + begin * rows.stride;
  const C sum = share<C, T, kAdjacent>(from, rows.stride, length, threadIdx.x, kThreads);
  __shared__ typename BlockSum::TempStorage shared;
  const double total = BlockSum(shared).Sum(static_cast<double>(sum));
  if (threadIdx.x > 0) return;
  if (plan.parts == 1) {
    result.store(row, total);
  } else {
    partial[blockIdx.x] = total;
  }
}

/// A block sums the parts of each row.
template <int = 0>
__global__ void __launch_bounds__(kThreads)
    finish(const double* partial, int64_t parts, Result result) {
  wait_for_previous_kernel();
  double sum = 0;
  for (int64_t part = threadIdx.x; part < parts; part += kThreads)
    sum += partial[blockIdx.x * parts + part];
  __shared__ typename BlockSum::TempStorage shared;
  const double total = BlockSum(shared).Sum(sum);
  if (threadIdx.x == 0) result.store(blockIdx.x, total);
}

inline int power_of_two_from(int64_t least) {
  int power = 1;
  while (power < least) power *= 2;
  return power;
}

/// Queues `kernel` with at least `blocks` blocks of work.
template <class... Parameters, class... Arguments>
Status queue(void (*kernel)(Parameters...), int64_t blocks, cudaStream_t stream,
             const Arguments&... arguments) {
  if (blocks > kMaxGridX) return {"too many rows for one launch"};
  const Grid grid{dim3(static_cast<unsigned>(blocks)), kThreads};
  return launch_overlapped(kernel, grid, stream, arguments...);
}

/// The sum of each row, divided, in the order of the grid [outer, inner].
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
      return queue(packed<T, C, kVectorLanes<T>>, grid, stream, rows, team, result);
    }
    case Kind::packed: {
      const int team = power_of_two_from(shape.length);
      const int64_t grid = ceil_div(count, int64_t{kThreads / team} * kPackedRows);
      return queue(packed<T, C, 1>, grid, stream, rows, team, result);
    }
    case Kind::staged: {
      // A multiple of eight rows keeps each tile as far from a boundary as the first one.
      const int64_t tile = kTileBytes / (shape.length * shape.size_of_element) / 8 * 8;
      const int64_t threads_a_row = kThreads / tile;
      const int team = threads_a_row < 2 ? 1 : power_of_two_from(threads_a_row / 2 + 1);
      return queue(staged<T, C>, ceil_div(count, tile), stream, rows, static_cast<int>(tile), team,
                   result);
    }
    case Kind::warps: {
      const int64_t grid = ceil_div(count, kThreads / kWarpLanes);
      return adjacent ? queue(warps<T, C, true>, grid, stream, rows, result)
                      : queue(warps<T, C, false>, grid, stream, rows, result);
    }
    case Kind::blocks:
      break;
  }
  double* partial = static_cast<double*>(allocate(partial_bytes(shape, plan)));
  const int64_t grid = count * plan.parts;
  const Status status = adjacent
                            ? queue(blocks<T, C, true>, grid, stream, rows, plan, partial, result)
                            : queue(blocks<T, C, false>, grid, stream, rows, plan, partial, result);
  if (!status.ok() || plan.parts == 1) return status;
  return queue(finish<>, count, stream, partial, plan.parts, result);
}

}  // namespace rows
}  // namespace torchkiln::reduce
