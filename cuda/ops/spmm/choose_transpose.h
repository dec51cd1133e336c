#pragma once

// Selects how a sparse pattern is transposed: pattern.cu has the table. Includes no header of CUDA.

#include <algorithm>
#include <optional>
#include <variant>

#include "torchkiln/device/device.h"
#include "torchkiln/kernels/spmm.h"

namespace torchkiln::cuda {

using namespace device;

// Ranks: each block reads all entries. It counts the ranks of kRankThreads >> lanes_log2 entries or
// columns, with 1 << lanes_log2 threads for each.
inline constexpr int kRankThreads = 128;
inline constexpr int kRankBits = 11;  // bits of a key with the index; the others have the column
inline constexpr int64_t kMostRanked = int64_t{1} << kRankBits;
/// Maximum number of comparisons for ranks. With 15 million, an H100 takes 9 us longer than for a
/// counting sort.
inline constexpr int64_t kMostComparisons = int64_t{1} << 23;
/// Maximum number of entries for which each entry is ranked by one thread. If there are more, four
/// threads rank each.
inline constexpr int64_t kMostRankedByOne = 256;

// Counting sort: one or two launches instead of the six or more of a radix sort.
inline constexpr int kSortThreads = 1024;
inline constexpr int kMostRounds = 4;
inline constexpr int64_t kMostSortBlocks = 132;         // the SMs of an H100
inline constexpr int64_t kMostSortedColumns = 1 << 13;  // counters in shared memory
/// Maximum number of counts in all blocks together. Every block reads all counts: 256 KB take about
/// 4 us.
inline constexpr int64_t kMostCounts = 1 << 16;
/// Maximum number of bytes of static shared memory per block, for the scan of CUB.
inline constexpr int kScanBytes = 4352;

// Radix sort.
inline constexpr int kLabelThreads = 256;
inline constexpr int kLabelItems = 4;  // entries per thread

struct RankPlan {
  static constexpr const char* kWhy =
      "Few entries: each counts the entries before it, in one launch.";
  int lanes_log2;
  int64_t entry_blocks;  // per matrix; blocks for the columns follow
  int64_t blocks;        // per matrix
  int64_t packed;        // elements of the result, per matrix
};

/// The plan of a counting sort. Each of the `blocks` blocks per matrix sorts `rounds` times
/// kSortThreads entries.
struct CountingPlan {
  static constexpr const char* kWhy =
      "Blocks count the columns in shared memory: fewer launches than a radix sort.";
  int64_t blocks;
  int rounds;
};

struct RadixPlan {
  static constexpr const char* kWhy = "Too many entries or columns for counters in shared memory.";
  int64_t label_blocks;  // per matrix, like pack_blocks
  int64_t pack_blocks;
};

using TransposePlan = std::variant<RankPlan, CountingPlan, RadixPlan>;

inline std::optional<RankPlan> plan_ranks(const CsrTranspose& p) {
  const int64_t entries = p.pattern.entries, columns = p.pattern.columns;
  if (entries == 0 || entries > kMostRanked || columns >= int64_t{1} << (32 - kRankBits) ||
      p.batch * entries * (entries + columns) > kMostComparisons)
    return std::nullopt;
  RankPlan plan{};
  plan.lanes_log2 = entries > kMostRankedByOne ? 2 : 0;
  const int64_t targets = kRankThreads >> plan.lanes_log2;
  plan.entry_blocks = ceil_div(entries, targets);
  plan.blocks = plan.entry_blocks + ceil_div(columns + 1, targets);
  plan.packed = packed_size(columns, entries);
  return plan;
}

/// Dynamic shared memory of a block: two counters per column.
inline int counter_bytes(const CsrPattern& pattern) {
  return static_cast<int>(2 * pattern.columns * static_cast<int64_t>(sizeof(int)));
}

inline std::optional<CountingPlan> plan_counting(const CsrPattern& pattern) {
  if (pattern.columns > kMostSortedColumns || pattern.entries == 0) return std::nullopt;
  if (pattern.entries <= 2 * kSortThreads) return CountingPlan{1, 2};
  for (int rounds = 1; rounds <= kMostRounds; ++rounds) {
    const int64_t blocks = ceil_div(pattern.entries, int64_t{kSortThreads} * rounds);
    if (blocks <= kMostSortBlocks && blocks * pattern.columns <= kMostCounts)
      return CountingPlan{blocks, rounds};
  }
  return std::nullopt;
}

inline TransposePlan choose(const CsrTranspose& p) {
  if (const auto ranks = plan_ranks(p)) return *ranks;
  if (const auto counting = plan_counting(p.pattern)) return *counting;
  const int64_t places = std::max(p.pattern.entries, p.pattern.columns + 1);
  return RadixPlan{ceil_div(p.pattern.entries, kLabelThreads * kLabelItems),
                   ceil_div(places, kLabelThreads)};
}

}  // namespace torchkiln::cuda
