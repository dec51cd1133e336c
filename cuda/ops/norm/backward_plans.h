#pragma once

// How the gradients of norms distribute rows, and how many of them are in flight. Each plan_*()
// returns nothing where its kernel does not support the call or another kernel is always faster.

#include "detail/rowwise/plans.h"
#include "thresholds.h"

namespace torchkiln::cuda::norm_gradients {

using namespace device;
using namespace rowwise;

inline int64_t row_bytes(const NormBackward& p) {
  return p.columns * static_cast<int64_t>(size_of(p.dtype));
}

inline size_t sum_bytes(const NormBackward& p) { return p.dtype == Dtype::float64 ? 8 : 4; }

// Vectors per thread. In half precision a thread has 2 x 32 column sums (weight, bias) in
// registers.
inline constexpr int kItems = 4;

inline constexpr int kFewThreads = 512;        // per block
inline constexpr int kStripThreads = 8;        // most threads along a row: 128 bytes of it
inline constexpr int kRowsOfStripThread = 32;  // most rows that a thread of a strip sums
inline constexpr int kElementsOfThread = 32;   // most elements of a row that a thread reads singly
// Up to this many rows, one thread sums its columns over all rows.
inline constexpr int kRowsOfThread = 8;

/// The plan for few rows. Some blocks read whole rows for grad_x; other blocks sum strips of
/// columns.
struct FewRowsPlan {
  static constexpr const char* kWhy =
      "The tensors stay in L2: they are read twice, and no second kernel adds partial sums.";
  TeamShape team;
  int row_blocks;
  int strips;
  int strip_threads;  // threads along a row
  bool in_vectors;    // else rows are read element by element
};

TORCHKILN_HOST_DEVICE inline bool has_short_columns(const NormBackward& p) {
  return p.rows <= kRowsOfThread && aligned(p.grad_weight) && aligned(p.grad_bias);
}

/// Threads along a strip of columns. The more rows, the fewer threads: a thread sums up to 8 rows,
/// or 16 single elements. A strip has at least a sector of 32 bytes, or 4 elements.
inline int strip_threads(const NormBackward& p, bool in_vectors) {
  const int64_t items = ceil_div(p.columns, in_vectors ? vector_lanes(p.dtype) : 1);
  const int64_t most = in_vectors ? std::clamp<int64_t>(kFewThreads * 8 / p.rows, 2, kStripThreads)
                                  : std::clamp<int64_t>(kFewThreads * 16 / p.rows, 4, kWarpLanes);
  int threads = 1;
  while (2 * threads <= most && threads < items) threads *= 2;
  return threads;
}

/// Whether reading few rows twice, from L2, is faster than a second kernel that adds partial sums.
inline bool are_few_rows(const NormBackward& p, bool in_vectors) {
  constexpr int64_t kMost = kFewThreads * kRowsOfStripThread;
  const bool are_small = p.rows * strip_threads(p, in_vectors) <= kMost &&
                         p.rows * p.columns <= thresholds::kMostFewElements;
  if (!in_vectors) return are_small && p.columns <= kFewThreads * kElementsOfThread;
  return (are_small || (p.rows <= thresholds::kMostFewRows &&
                        p.rows * row_bytes(p) <= thresholds::kMostFewBytes)) &&
         row_bytes(p) <= kFewThreads * kItems * kVectorBytes;
}

inline std::optional<FewRowsPlan> plan_few_rows(const NormBackward& p, Alignment alignment,
                                                const Device& device) {
  FewRowsPlan plan{};
  plan.in_vectors = alignment == Alignment::vector;
  if (!are_few_rows(p, plan.in_vectors)) return std::nullopt;
  const auto ceil = [](int64_t a, int64_t b) { return static_cast<int>(ceil_div(a, b)); };
  const int vectors = ceil(p.columns, plan.in_vectors ? vector_lanes(p.dtype) : 1);
  // With at most one row per SM, a thread has as few vectors as possible, because it loads the
  // weights of its vectors one after the other.
  const bool many = p.rows > device.multiprocessors;
  plan.team = make_team(many ? ceil(vectors, kItems) : vectors, kFewThreads, kFewThreads, 1);
  plan.row_blocks = p.grad_x == nullptr ? 0 : ceil(p.rows, plan.team.per_block);
  const bool has_sums = p.grad_weight != nullptr || p.grad_bias != nullptr;
  plan.strip_threads = strip_threads(p, plan.in_vectors);
  const int width = has_short_columns(p) ? plan.team.block_threads() : plan.strip_threads;
  plan.strips = has_sums ? ceil(vectors, width) : 0;
  return plan;
}

inline constexpr int kBulkThreads = 512;  // per block: 128 registers per thread
inline constexpr int kBulkWarps = kBulkThreads / kWarpLanes;
inline constexpr int kBulkVectors = 2;      // per thread and row
inline constexpr int kLongBulkVectors = 4;  // per thread and row, for rows above 16 KiB
inline constexpr int kMinBulkThreads = 64;
inline constexpr int kMaxBulkTeams = kBulkThreads / kMinBulkThreads;
inline constexpr int kMaxBulkStages = 4;

struct BulkPlan {
  static constexpr const char* kWhy =
      "Bulk copies keep 96 KiB in flight per SM without a thread that waits for addresses.";
  TeamShape team;
  int vectors;  // per thread and row
  int stages;   // rows of a team in shared memory or in flight
  int shared_bytes;
  int64_t blocks;
};

inline std::optional<BulkPlan> plan_bulk(const NormBackward& p, Alignment alignment,
                                         const Device& device) {
  const int64_t vectors = row_bytes(p) / kVectorBytes;
  const bool is_long = vectors > kBulkVectors * kBulkThreads;
  // With 4 vectors per thread, no registers are left for a third tensor or a second set of column
  // sums.
  const int most = p.centered || p.grad_sum != nullptr ? kBulkVectors : kLongBulkVectors;
  if (!device.runs_90_code || alignment != Alignment::vector || p.dtype == Dtype::float64 ||
      p.grad_x == nullptr || vectors < kMinBulkThreads || vectors > most * kBulkThreads)
    return std::nullopt;
  BulkPlan plan{};
  plan.vectors = is_long ? kLongBulkVectors : kBulkVectors;
  const int64_t warps = ceil_div(ceil_div(vectors, plan.vectors), kWarpLanes);
  const int threads = std::max(static_cast<int>(warps) * kWarpLanes, kMinBulkThreads);
  // Fewer teams per block, if the blocks then occupy more SMs.
  const int64_t rows_per_block = ceil_div(p.rows, device.multiprocessors);
  const int teams = static_cast<int>(std::min<int64_t>(kBulkThreads / threads, rows_per_block));
  plan.team = {threads, 31, 0, teams};
  const int tensors = p.grad_sum == nullptr ? 2 : 3;
  const int stage_bytes = static_cast<int>(row_bytes(p)) * tensors * teams;
  plan.stages = std::clamp((thresholds::kBulkBytesInFlight + stage_bytes - 1) / stage_bytes, 2,
                           kMaxBulkStages);
  const int partial_bytes = teams > 1 ? teams * static_cast<int>(p.columns * sizeof(float)) : 0;
  const int weight_bytes =
      is_long ? threads * kLongBulkVectors * kVectorBytes / static_cast<int>(size_of(p.dtype)) * 4
              : 0;
  plan.shared_bytes = std::max(plan.stages * stage_bytes + weight_bytes, partial_bytes);
  plan.blocks = std::min<int64_t>(device.multiprocessors, ceil_div(p.rows, teams));
  return plan;
}

// Threads per block of streamed rows. One block of 512 threads with 128 registers each fills an SM.
// Small teams share a block and its column parameters, which leaves shared memory for one more
// stage.
inline constexpr int kThreads = 512;
// Warps per block in clusters of more than 8 blocks. Two stages leave too little L1 for the spilled
// registers of more warps.
inline constexpr int kLargeBlockWarps = 11;
inline constexpr int kLargeClusterWarps = kLargeClusterBlocks * kLargeBlockWarps;

struct StreamPlan {
  static constexpr const char* kWhy =
      "A block or cluster copies the next rows ahead, and keeps the sums of its columns.";
  TeamShape team;
  int stages;  // rows in shared memory or in flight
  int shared_bytes;
  int64_t teams;  // blocks, or clusters
  Alignment alignment;
};

/// Returns nullopt if rows are too long, or if their tensors have no common offset from a 16-byte
/// boundary.
inline std::optional<StreamPlan> plan_stream(const NormBackward& p, Alignment alignment,
                                             const Device& device) {
  if (alignment == Alignment::scalar) return std::nullopt;
  const int lanes = vector_lanes(p.dtype);
  const int64_t vectors = ceil_div(p.columns, lanes) + (alignment == Alignment::vector ? 0 : 1);
  const int64_t threads = ceil_div(vectors, kItems);
  const int max_blocks = device.runs_90_code ? kMaxClusterBlocks : 1;
  StreamPlan plan{};
  plan.alignment = alignment;
  plan.team = make_team(threads, kThreads, kThreads, max_blocks);
  if (plan.team.size() < threads && max_blocks > 1)
    plan.team = make_team(threads, kLargeBlockWarps * kWarpLanes, kThreads, kLargeClusterBlocks);
  if (plan.team.size() < threads) return std::nullopt;
  const auto shared_bytes = [&](int stages) {
    const int parameters = lanes * static_cast<int>(sum_bytes(p)) * plan.team.threads;
    return kItems * (stages * 2 * kVectorBytes * kThreads + parameters);
  };
  const auto fits = [&](int stages) {
    const bool large = plan.team.blocks() > kMaxClusterBlocks;
    const size_t storage = stages == 3 ? sizeof(TeamStorage<float, 2>)
                                       : sizeof(TeamStorage<float, 2, kLargeClusterWarps>);
    const int storage_bytes = static_cast<int>(storage * (sum_bytes(p) / sizeof(float)));
    return !(large && stages == 3) && shared_bytes(stages) + storage_bytes <= device.shared_bytes;
  };
  const int resident = device.clusters[plan.team.log_blocks];
  if (!fits(2) || resident == 0) return std::nullopt;
  plan.stages = fits(3) ? 3 : 2;
  plan.shared_bytes = shared_bytes(plan.stages);
  plan.teams = std::min<int64_t>(resident, ceil_div(p.rows, plan.team.per_block));
  // A multiple of the lanes of a vector, so that all rows of a block have the same offset from a
  // 16-byte boundary.
  if (alignment == Alignment::shared_offset)
    plan.teams = std::max<int64_t>(plan.teams / lanes, 1) * lanes;
  return plan;
}

inline constexpr int kSplitRows = 4;  // per thread and step

}  // namespace torchkiln::cuda::norm_gradients
