#pragma once

// The plan that cuts rows of norms into slabs of columns, on compute capability 9.0 and later.

#include <numeric>

#include "detail/rowwise/plans.h"
#include "thresholds.h"

namespace torchkiln::cuda::norm_slabs {

using namespace device;
using namespace rowwise;

inline constexpr int kSlabThreads = 256;  // computing threads per block
inline constexpr int kSlabBlockThreads = kSlabThreads + 2 * kWarpLanes;
inline constexpr int kSlabBlocks = 2;  // per SM
// Bytes of shared memory per block that stages cannot use: static arrays, and what the system
// reserves.
inline constexpr int kSlabReserved = 3 << 10;
inline constexpr int kSlabBytes = 32;  // per thread, of each tensor
inline constexpr int kMaxSlabStages = 8;
inline constexpr int kMaxSlabTensors = 3;
inline constexpr int64_t kMaxSlabRows = 1 << 30;

/// The rows that are cut into slabs: tensors of the same shape.
struct SlabRows {
  const void* data[kMaxSlabTensors];
  int64_t row_stride[kMaxSlabTensors];
  int tensors;
  int64_t rows;
  int64_t columns;
  Dtype dtype;
  Alignment alignment;  // scalar: element by element, else in vectors
  int run_rows;         // time between two runs, in rows that a team could copy
};

/// The distribution of rows. A team processes rows one by one. Rows that are read in vectors are
/// grouped into runs of rows with the same offset from a 16-byte boundary.
struct SlabPlan {
  int blocks;   // per team, one per slab
  int columns;  // per slab
  int teams;
  int runs;          // per team; run r begins with row team + r * teams
  int row_step;      // between the rows of a run
  bool in_vectors;   // slabs are read in vectors, not element by element
  int stages;        // slabs in shared memory or in flight
  int lag;           // rows between the sums of a row and its results
  int tensor_bytes;  // bytes of a slab per tensor
  int shared_bytes;
};

/// The number of different offsets from a 16-byte boundary among the rows.
inline int count_offsets(const SlabRows& rows) {
  if (rows.rows == 1) return 1;
  int offsets = vector_lanes(rows.dtype);
  for (int64_t step = rows.row_stride[0]; offsets > 1 && step % 2 == 0; step /= 2) offsets /= 2;
  return offsets;
}

inline int resident_slabs(const Device& device) { return device.multiprocessors * kSlabBlocks; }

inline int most_slab_columns(const SlabRows& rows) {
  return kSlabThreads * kSlabBytes / static_cast<int>(size_of(rows.dtype));
}

/// The columns that slabs have to cover. Slabs in vectors begin at 16-byte boundaries, the first
/// slab at or before the first element of the row.
inline int64_t columns_to_cut(const SlabRows& rows, Alignment alignment) {
  return rows.columns + (alignment == Alignment::shared_offset ? vector_lanes(rows.dtype) - 1 : 0);
}

/// Cuts rows into slabs for `teams` teams.
inline SlabPlan cut_rows(const SlabRows& rows, Alignment alignment, int teams,
                         const Device& device) {
  SlabPlan plan{};
  const int size = static_cast<int>(size_of(rows.dtype));
  const int lanes = kVectorBytes / size;
  const int offsets = alignment == Alignment::shared_offset ? count_offsets(rows) : 1;
  plan.teams = teams;
  plan.row_step = teams < rows.rows ? std::lcm(teams, offsets) : teams;
  plan.runs = plan.row_step / teams;
  plan.in_vectors = alignment != Alignment::scalar;
  // Slabs of whole vectors, with equal widths if possible, and not too narrow.
  const int64_t columns = columns_to_cut(rows, alignment);
  const int64_t least = ceil_div(columns, most_slab_columns(rows));
  const int64_t most = std::max(least, ceil_div(columns, lanes * kMinSlab));
  const int64_t blocks = std::min<int64_t>({resident_slabs(device) / teams, most, kMaxTeamBlocks});
  plan.columns = static_cast<int>(ceil_div(ceil_div(columns, blocks), lanes)) * lanes;
  plan.blocks = static_cast<int>(ceil_div(columns, plan.columns));
  // If rows are read element by element, a slab may begin between 16-byte boundaries, and then
  // occupies one 16-byte unit more.
  plan.tensor_bytes = plan.columns * size + (plan.in_vectors ? 0 : kVectorBytes);
  return plan;
}

/// An estimate of the time that a plan takes, in bytes that a block could copy meanwhile.
inline int64_t cost_of(const SlabPlan& plan, const SlabRows& rows) {
  const int64_t steps = ceil_div(rows.rows, plan.teams) + rows.run_rows * (plan.runs - 1);
  return steps * (plan.tensor_bytes + thresholds::kWaitBytesOfSlabRow);
}

/// Shares rows among as many teams as are resident, or among fewer teams if that takes less time,
/// because they have fewer runs. nullopt if a row does not fit in the resident blocks.
inline std::optional<SlabPlan> share_rows(const SlabRows& rows, Alignment alignment,
                                          const Device& device) {
  const int resident = resident_slabs(device);
  const int64_t least = ceil_div(columns_to_cut(rows, alignment), most_slab_columns(rows));
  if (least > std::min(resident, kMaxTeamBlocks)) return std::nullopt;
  const int all = static_cast<int>(std::min(resident / least, rows.rows));
  const SlabPlan plan = cut_rows(rows, alignment, all, device);
  if (plan.runs == 1) return plan;
  const int offsets = count_offsets(rows);
  const int fewer = all < offsets ? 1 << (ceil_log2(all + 1) - 1) : all / offsets * offsets;
  const SlabPlan other = cut_rows(rows, alignment, fewer, device);
  return cost_of(other, rows) < cost_of(plan, rows) ? other : plan;
}

/// Returns nullopt if slabs do not support the rows. exchanges: whether blocks exchange sums over
/// whole rows.
inline std::optional<SlabPlan> plan_slabs(const SlabRows& rows, bool exchanges,
                                          const Device& device) {
  if (!device.runs_90_code || rows.dtype == Dtype::float64 || rows.rows > kMaxSlabRows)
    return std::nullopt;
  std::optional<SlabPlan> plan = share_rows(rows, rows.alignment, device);
  if (plan && plan->runs > 1 && rows.rows < thresholds::kFewestRowsOfSlabRun * plan->row_step)
    plan = share_rows(rows, Alignment::scalar, device);
  if (!plan) return std::nullopt;
  const int most_bytes = device.shared_bytes / kSlabBlocks - kSlabReserved;
  const int stage_bytes = rows.tensors * plan->tensor_bytes;
  plan->stages = std::min(most_bytes / stage_bytes, kMaxSlabStages);
  // Row i + 1 must be in flight before the results of row i - lag are written. By then, the stage
  // of row i - lag - 1 is the last one that was released. It takes row i - lag - 1 + stages, which
  // is row i + 1 or a later row if lag <= stages - 2.
  constexpr int kFewestStages = 4;
  if (plan->stages < kFewestStages) return std::nullopt;
  plan->lag = exchanges ? (plan->stages + 1) / 2 : 0;
  plan->shared_bytes = plan->stages * stage_bytes;
  return plan;
}

/// The arguments of a launch: rows and their plan.
struct SlabCall {
  SlabRows rows;
  SlabPlan plan;
  bool exchanges;

  /// Blocks that exchange sums wait for each other, so all of them must be resident.
  bool is_cooperative() const { return plan.blocks > 1 && exchanges; }
};

}  // namespace torchkiln::cuda::norm_slabs
