#pragma once

// The kernels for row sums, see rows.cuh.

#include "detail/reduce/common.cuh"
#include "detail/reduce/row_loads.cuh"
#include "torchkiln/device/block_reduce.cuh"

namespace torchkiln::reduce {
using namespace device;
namespace rows {

/// Rows of `length` elements that are `stride` apart.
template <class T>
struct Rows {
  const T* in;
  Offsets begin;
  int64_t count;
  int64_t length;
  int64_t stride;
};

/// Sums packed rows. A row has at most `team` vectors of kLanes elements, one for each of `team`
/// lanes; `team` is a power of two.
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

/// Sums staged rows. A block copies `tile` consecutive rows, `pitch` elements apart, together with
/// the gaps between them. Then `team` lanes sum each row.
template <class T, class C>
__global__ void __launch_bounds__(kThreads)
    staged(Rows<T> rows, int tile, int pitch, int team, Result result) {
  constexpr int kLanes = kVectorLanes<T>;
  alignas(kVectorBytes) __shared__ unsigned char memory[kTileBytes + kVectorBytes];
  wait_for_previous_kernel();
  const int length = static_cast<int>(rows.length);
  const int64_t first = int64_t{blockIdx.x} * tile;
  const int count = static_cast<int>(min(int64_t{tile}, rows.count - first));
  const T* from = rows.in + first * pitch;
  // The copy begins at the same offset from a 16-byte boundary as `from`, so that vectors of both
  // are aligned.
  const int past = static_cast<int>(reinterpret_cast<uintptr_t>(from) / sizeof(T) % kLanes);
  T* to = reinterpret_cast<T*>(memory) + past;
  const int elements = (count - 1) * pitch + length;
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
  // All threads of the block run the same iterations, because reduce_warp() needs all lanes.
  for (int base = 0; base < count; base += kThreads / team) {
    const int row = base + static_cast<int>(threadIdx.x) / team;
    C sum = 0;
    if (row < count) {
#pragma unroll 4
      for (int i = rank; i < length; i += team) sum += widened<C>(to[row * pitch + i]);
    }
    sum = reduce_warp(sum, Sum{}, team);
    if (rank == 0 && row < count) result.store(first + row, sum);
  }
}

/// Blocks per SM. The sums need more registers only for narrower elements that are summed in
/// float64.
template <class T, class C>
inline constexpr int kBlocksThatFit = sizeof(C) > sizeof(Compute<T>) ? kBlocksPerMultiprocessor / 2
                                                                     : kBlocksPerMultiprocessor;

/// Sums one row per warp.
template <class T, class C, bool kAdjacent>
__global__ void __launch_bounds__(kThreads, kBlocksThatFit<T, C>)
    warp_per_row(Rows<T> rows, Result result) {
  wait_for_previous_kernel();
  const int rank = threadIdx.x % kWarpLanes;
  const int64_t row = int64_t{blockIdx.x} * (kThreads / kWarpLanes) + threadIdx.x / kWarpLanes;
  if (row >= rows.count) return;
  const T* from = rows.in + rows.begin(row);
  const C sum = thread_sum<C, T, kAdjacent>(from, rows.stride, rows.length, rank, kWarpLanes);
  const C total = reduce_warp(sum);
  if (rank == 0) result.store(row, total);
}

/// Sums one row per block or, if plan.parts > 1, one part of a row.
template <class T, class C, bool kAdjacent>
__global__ void __launch_bounds__(kThreads, kBlocksThatFit<T, C>)
    block_per_row(Rows<T> rows, Plan plan, double* partial, Result result) {
  wait_for_previous_kernel();
  const int64_t row = plan.parts == 1 ? blockIdx.x : blockIdx.x / plan.parts;
  const int64_t begin = (blockIdx.x - row * plan.parts) * plan.part_length;
  const int64_t length = min(plan.part_length, rows.length - begin);
  const T* from = rows.in + rows.begin(row) + begin * rows.stride;
  const C sum = thread_sum<C, T, kAdjacent>(from, rows.stride, length, threadIdx.x, plan.threads);
  const double total = reduce_block(static_cast<double>(sum));
  if (threadIdx.x > 0) return;
  if (plan.parts == 1) {
    result.store(row, total);
  } else {
    partial[blockIdx.x] = total;
  }
}

/// Adds the sums of a row's parts, one row per block.
template <int = 0>
__global__ void __launch_bounds__(kThreads)
    finish(const double* partial, int64_t parts, Result result) {
  wait_for_previous_kernel();
  double sum = 0;
  for (int64_t part = threadIdx.x; part < parts; part += kThreads)
    sum += partial[blockIdx.x * parts + part];
  const double total = reduce_block(sum);
  if (threadIdx.x == 0) result.store(blockIdx.x, total);
}

}  // namespace rows
}  // namespace torchkiln::reduce
