#pragma once

// The distribution of rows over threads, blocks and clusters. Depends on shape and device only, and
// includes no header of CUDA.
//
//   TeamShape, RowPlan   a team holds a row in its registers
//   PartPlan             longer rows, in parts that different blocks read twice: parts.cuh
//   GridPlan             longer rows, for gradients: blocks wait for each other, grid_team.cuh

#include <algorithm>
#include <optional>

#include "torchkiln/device/alignment.h"

namespace torchkiln::rowwise {
using namespace device;

inline constexpr int kMaxClusterBlocks = 8;     // every GPU with clusters supports them
inline constexpr int kLargeClusterBlocks = 16;  // some GPUs support them; the kernel must opt in
inline constexpr int kMaxTeamThreads = 512;     // per block of a cluster
inline constexpr int kMaxWarps = kMaxClusterBlocks * kMaxTeamThreads / kWarpLanes;

/// The size of a team. Up to 32 threads it is a power of two, above that whole warps. A team shares
/// a block with other teams, or is one block, or is all blocks of a cluster.
struct TeamShape {
  int threads;      // threads of the team per block
  int log_threads;  // up to 32 threads: their log2; else 31, so that thread >> 31 is 0
  int log_blocks;   // log2 of the blocks per cluster
  int per_block;    // teams per block

  TORCHKILN_HOST_DEVICE int blocks() const { return 1 << log_blocks; }
  TORCHKILN_HOST_DEVICE int size() const { return threads << log_blocks; }
  TORCHKILN_HOST_DEVICE int block_threads() const { return threads * per_block; }
  /// Whether the team needs no barriers.
  TORCHKILN_HOST_DEVICE bool in_warp() const { return threads <= kWarpLanes; }
};

inline int ceil_log2(int64_t least) {
  int log = 0;
  while (int64_t{1} << log < least) ++log;
  return log;
}

/// A team of at least `threads` threads, or the largest possible one, in blocks of up to
/// `block_threads` threads and clusters of up to `max_blocks` blocks. Several small teams share a
/// block of up to `shared_threads` threads.
inline TeamShape make_team(int64_t threads, int block_threads, int shared_threads, int max_blocks) {
  int log_blocks = ceil_log2(ceil_div(threads, block_threads));
  if (1 << log_blocks > max_blocks) log_blocks = ceil_log2(max_blocks);
  const int64_t warps = ceil_div(ceil_div(threads, 1 << log_blocks), kWarpLanes);
  int in_block = static_cast<int>(std::min<int64_t>(warps * kWarpLanes, block_threads));
  if (threads <= kWarpLanes) in_block = 1 << ceil_log2(threads);
  if (2 * in_block > shared_threads) return {in_block, 31, log_blocks, 1};
  const int log_threads = in_block <= kWarpLanes ? ceil_log2(in_block) : 31;
  return {in_block, log_threads, log_blocks, shared_threads / in_block};
}

/// make_team() for kernels in which only teams of up to a warp share a block.
inline TeamShape make_row_team(int64_t threads, int block_threads, int max_blocks) {
  constexpr int kSmallBlock = 128;  // threads of a block with several teams
  return make_team(threads, block_threads, threads <= kWarpLanes ? kSmallBlock : 0, max_blocks);
}

/// The most blocks of a cluster on this device.
inline int most_cluster_blocks(const Device& device) {
  return device.runs_90_code ? kMaxClusterBlocks : 1;
}

/// Shared memory through which a team's warps exchange values. Two halves alternate, so that one
/// barrier per exchange is enough: a warp writes to a half again only after every warp has
/// published its values for the next exchange, and thus has read this half.
template <class C, int kValues, int kSlots = kMaxWarps>
struct TeamStorage {
  C slots[2][kValues][kSlots];
  uint64_t arrived[2];
};

// Threads of a block with one row. At 64 registers per thread, two blocks fit on an SM.
inline constexpr int kRowThreads = 512;
/// Vectors of a row that a thread loads together; kManyItems for longer rows.
inline constexpr int kFewItems = 4;
inline constexpr int kManyItems = 8;

/// Longest row, in elements. Column numbers then fit in 32 bits, even those beyond the last column
/// that a loop computes.
inline constexpr int64_t kMaxColumns = (int64_t{1} << 31) - (int64_t{1} << 20);
inline constexpr const char* kTooLong = "a row has more than 2^31 - 2^20 elements";

/// A team, and the vectors per thread with which it holds a row: kFewItems or kManyItems.
struct RowPlan {
  TeamShape team;
  int items;
};

/// Returns nullopt if the row is too long for a team. `streams`: rows that a thread holds at the
/// same time. `cluster_threads`: preferred threads per block of a cluster; small blocks are
/// scheduled sooner, large blocks exchange less.
inline std::optional<RowPlan> make_row_plan(int64_t vectors, int64_t min_threads, int streams,
                                            int cluster_threads, const Device& device) {
  const int max_blocks = most_cluster_blocks(device);
  const auto plan = [&](int items, int block, int blocks) -> std::optional<RowPlan> {
    const int64_t threads = std::max(ceil_div(vectors, items), min_threads);
    const RowPlan found{make_row_team(threads, block, blocks), items};
    if (found.team.size() < threads) return std::nullopt;
    return found;
  };
  const auto in_cluster = [&](int items) {
    const std::optional<RowPlan> found = plan(items, cluster_threads, max_blocks);
    return found ? found : plan(items, kRowThreads, max_blocks);
  };
  // More vectors per thread are more loads in flight, which hide the latency of the reduction. A
  // thread with one row therefore takes kManyItems before a second block joins in a cluster. With
  // two rows, kFewItems of each already fill its registers.
  std::optional<RowPlan> found =
      streams == 1 ? plan(kFewItems, kRowThreads, 1) : in_cluster(kFewItems);
  if (!found && streams == 1) found = plan(kManyItems, kRowThreads, 1);
  return found ? found : in_cluster(kManyItems);
}

/// The number of vectors of a row in an UnalignedRowTile. One whole vector is left to the tail,
/// because the parameters of a vector lie across two aligned vectors of the parameter array, and
/// the second of them must not reach beyond the array.
TORCHKILN_HOST_DEVICE constexpr int64_t inner_vectors(int64_t columns, int lanes) {
  return columns < lanes ? 0 : columns / lanes - 1;
}
/// Fewest threads of a team with an UnalignedRowTile: one per element of head and tail.
constexpr int fewest_edge_threads(int lanes) { return 2 * lanes - 1; }

/// Changes shared_offset to scalar for short rows. Element by element they take at most `lanes`
/// threads, whereas the elements at the edges alone would take fewest_edge_threads(lanes).
constexpr Alignment without_short_edges(Dtype dtype, Alignment alignment, int64_t columns) {
  const bool is_short = columns <= kFewItems * vector_lanes(dtype);
  return alignment == Alignment::shared_offset && is_short ? Alignment::scalar : alignment;
}

/// make_row_plan() for the tile that with_tile() selects for this alignment.
inline std::optional<RowPlan> plan_rows(Dtype dtype, Alignment alignment, int64_t columns,
                                        int streams, int cluster_threads, const Device& device) {
  const int lanes = vector_lanes(dtype);
  const auto plan = [&](int64_t vectors, int64_t min_threads) {
    return make_row_plan(vectors, min_threads, streams, cluster_threads, device);
  };
  if (alignment == Alignment::vector) return plan(ceil_div(columns, lanes), 1);
  if (alignment == Alignment::shared_offset)
    return plan(inner_vectors(columns, lanes), fewest_edge_threads(lanes));
  return plan(columns, 1);
}

inline constexpr int kPartThreads = 256;

/// The parts of rows.
struct PartPlan {
  int parts;      // per row
  int64_t tasks;  // parts of all rows
  int64_t lag;    // tasks between the first and the second read of a part

  int64_t blocks() const { return 2 * (tasks + lag); }
};

/// `vectors`: most vectors, of `lanes` elements, per thread of a part. `blocks`: blocks per SM.
inline PartPlan make_part_plan(int64_t rows, int64_t columns, int lanes, int vectors, int blocks,
                               const Device& device) {
  const int64_t all = ceil_div(columns, lanes);
  const int64_t resident = int64_t{device.multiprocessors} * blocks;
  const int64_t least = ceil_div(all, int64_t{kPartThreads} * vectors);
  const int64_t most = std::max(least, ceil_div(all, kPartThreads));
  // The even blocks, half of the resident ones, reduce (parts.cuh). Rows are cut into a part for
  // each even block, if that is between least and most.
  const int64_t parts = std::clamp(ceil_div(resident / 2, rows), least, most);
  return {static_cast<int>(parts), rows * parts, parts + resident / 2};
}

// Threads per block, and blocks per SM. A thread then has 128 registers.
inline constexpr int kGridThreads = 256;
inline constexpr int kGridBlocks = 2;
inline constexpr int kMaxTeamBlocks = 288;
// Fewest vectors of a row per block. With fewer, exchanging sums takes more time than further
// blocks save.
inline constexpr int kMinSlab = 64;
// Fewest rows for which the rows that a team reads in one step may be `lanes` rows apart. Fewer
// rows are read in adjacent order: see make_grid_plan().
inline constexpr int64_t kMinStridedRows = 128;
// Base-2 logarithm of the fewest threads along a row.
inline constexpr int kLogMinRowThreads = 2;

/// The distribution of rows over the teams of a grid.
struct GridPlan {
  int blocks;       // per team
  int log_threads;  // log2 of a block's threads per row: all of them if a team has several blocks
  int log_stride;   // log2 of the distance between the rows of a step
  int slab;         // vectors of a row per block
  int64_t teams;
  int64_t steps;  // all teams together
};

/// Distributes rows over a grid, in vectors of `lanes` elements. In a step, a thread reads
/// `rows_per_thread` rows, and one or more vectors of each row. The rows of a step may be `lanes`
/// rows apart: such rows have the same offset from a 16-byte boundary.
inline GridPlan make_grid_plan(int64_t rows, int64_t columns, int lanes, int rows_per_thread,
                               const Device& device) {
  GridPlan plan{};
  const int64_t vectors = ceil_div(columns, lanes);
  const int64_t resident = int64_t{device.multiprocessors} * kGridBlocks;
  const int64_t least = ceil_div(vectors, kGridThreads);
  plan.log_threads = std::clamp(ceil_log2(vectors), kLogMinRowThreads, ceil_log2(kGridThreads));
  plan.log_stride = least > 1 && rows >= kMinStridedRows ? ceil_log2(lanes) : 0;
  const int64_t block_rows = kGridThreads >> plan.log_threads << plan.log_stride;
  plan.steps = ceil_div(rows, rows_per_thread * block_rows) << plan.log_stride;
  plan.teams = std::clamp<int64_t>(resident / least, 1, plan.steps);
  const int64_t most = std::min<int64_t>(kMaxTeamBlocks, ceil_div(vectors, kMinSlab));
  const int64_t blocks = least == 1 ? 1 : std::min(resident / plan.teams, most);
  plan.slab = static_cast<int>(ceil_div(vectors, blocks));
  plan.blocks = static_cast<int>(ceil_div(vectors, plan.slab));
  return plan;
}

}  // namespace torchkiln::rowwise
