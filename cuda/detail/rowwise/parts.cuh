#pragma once

// Rows that do not fit in the registers of a team, cut into parts. There are two blocks per part,
// one for each phase:
//
//   even blocks   part i          reduce it; the last of a row's blocks merges the parts
//   odd blocks    part i - lag    wait for the merged values, read the part again, write results
//
// The lag is long enough for the merged values to be ready, and short enough for the second read to
// hit L2, if a row fits there. GPUs start blocks in the order of their index, which CUB's scans
// assume, too. An even block never waits. An odd block waits only for blocks that run or have
// finished, whatever else occupies the device. Parts are merged in a fixed order: results do not
// depend on the order of arrival.

#include <cuda/atomic>

#include "detail/rowwise/part_tile.cuh"
#include "detail/rowwise/team.cuh"
#include "torchkiln/core/workspace.h"

namespace torchkiln::rowwise {
using namespace device;

inline constexpr int kPartWarps = kPartThreads / kWarpLanes;

/// The values of parts and rows, in global memory.
template <class C>
struct PartValues {
  C* of_parts;         // [rows, parts, values]
  C* of_rows;          // [rows, values]
  unsigned* progress;  // per row: the number of reduced parts, plus 1 once merged
};

template <class C>
Status allocate_part_values(const PartPlan& plan, int values, Allocate allocate,
                            cudaStream_t stream, PartValues<C>& found) {
  const int64_t rows = plan.tasks / plan.parts;
  found.of_parts =
      static_cast<C*>(allocate(static_cast<size_t>((plan.tasks + rows) * values) * sizeof(C)));
  found.of_rows = found.of_parts + plan.tasks * values;
  const size_t bytes = static_cast<size_t>(rows) * sizeof(unsigned);
  found.progress = static_cast<unsigned*>(allocate(bytes));
  return status_of(cudaMemsetAsync(found.progress, 0, bytes, stream));
}

/// Computes rows in parts. Row: the elements of a row that one thread holds, in a PartTile.
///   load()                requests the elements
///   reduce(team, values)  kValues values, combined over the warp; Op combines the warps' values
///   write(values)         results, from the values of the whole row
template <class Row, int kBlocks>
__global__ void __launch_bounds__(kPartThreads, kBlocks)
    rows_in_parts(typename Row::Problem p, PartPlan plan, PartValues<typename Row::C> shared) {
  using C = typename Row::C;
  using Op = typename Row::Op;
  using Progress = ::cuda::atomic_ref<unsigned, ::cuda::thread_scope_device>;
  constexpr int kValues = Row::kValues;
  __shared__ TeamStorage<C, kValues, kPartWarps> storage;
  __shared__ bool is_last;
  wait_for_previous_kernel();
  const bool writes = (blockIdx.x & 1) != 0;
  const int64_t task = int64_t{blockIdx.x >> 1} - (writes ? plan.lag : 0);
  if (task < 0 || task >= plan.tasks) return;
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t index = task / plan.parts;
  const int part = static_cast<int>(task - index * plan.parts);
  Row row(p, index, part * kPartThreads + thread, plan.parts * kPartThreads);
  row.load();
  Team<C, kValues, false, kPartWarps> team({kPartThreads, 31, 0, 1}, storage);
  Progress progress(shared.progress[index]);
  const unsigned merged = static_cast<unsigned>(plan.parts) + 1;
  C* const of_parts = shared.of_parts + index * plan.parts * kValues;
  C* const of_row = shared.of_rows + index * kValues;
  C values[kValues];
  if (writes) {
    if (thread == 0) {
      while (progress.load(::cuda::memory_order_acquire) != merged) {
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kValues; ++i) values[i] = __ldcg(of_row + i);
    row.write(values);
    return;
  }
  row.reduce(team, values);
  team.reduce_warps(values, Op{});
  if (thread == 0) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) of_parts[part * kValues + i] = values[i];
    is_last = progress.fetch_add(1, ::cuda::memory_order_acq_rel) + 2 == merged;
  }
  __syncthreads();
  if (!is_last) return;
  clear(Op{}, values, 0);
  for (int at = thread; at < plan.parts; at += kPartThreads) {
    C others[kValues];
#pragma unroll
    for (int i = 0; i < kValues; ++i) others[i] = __ldcg(of_parts + at * kValues + i);
    combine(Op{}, values, others, 0);
  }
  team.reduce(values, Op{});
  if (thread > 0) return;
#pragma unroll
  for (int i = 0; i < kValues; ++i) of_row[i] = values[i];
  progress.store(merged, ::cuda::memory_order_release);
}

/// Queues rows_in_parts. kBlocks: blocks per SM; with 4 a thread has 64 registers, with 3 it has
/// 80.
template <class Row, int kBlocks>
Status launch_in_parts(const typename Row::Problem& p, const PartPlan& plan, Allocate allocate,
                       CUstream_st* stream) {
  if (plan.blocks() > kMaxGridX) return {"too many rows for one launch"};
  PartValues<typename Row::C> values{};
  const Status status = allocate_part_values(plan, Row::kValues, allocate, stream, values);
  if (!status.ok()) return status;
  const Grid grid{dim3(static_cast<unsigned>(plan.blocks())), dim3(kPartThreads)};
  return launch_overlapped(rows_in_parts<Row, kBlocks>, grid, stream, p, plan, values);
}

}  // namespace torchkiln::rowwise
