#pragma once

// Selects the kernel for the product of a sparse and a dense matrix, and for the gradient of its
// values: product.cu and sampled.cu have the tables. Includes no header of CUDA.

#include <algorithm>
#include <variant>

#include "detail/sparse/plans.h"

namespace torchkiln::cuda {

using namespace device;
using namespace sparse;

inline constexpr int kSpmmThreads = 128;  // per block, also for gradients
inline constexpr int kWarpLog2 = 5;

/// How threads read the dense matrix. kRows: vectors of elements that are adjacent in memory.
/// kColumns: vectors of adjacent elements of a row that are not adjacent in memory. kSpaced:
/// elements that are 32 columns apart, if rows are aligned to single elements.
enum class Access { kRows, kColumns, kSpaced };

/// Blocks per SM. Float32 takes 64 registers per thread. Other types need more: 2-byte types
/// convert 8 rows of 16 bytes to 32 bytes each, float64 has 64-bit weights. kColumns has more
/// addresses.
constexpr int spmm_blocks(size_t bytes, Access access) {
  if (access == Access::kColumns) return 4;
  if (access == Access::kSpaced) return 5;
  return bytes == sizeof(float) ? 8 : 6;
}

/// The distribution of a piece (entries of one sparse row) over threads, and of pieces over blocks.
/// A group of lanes reads a row of the dense matrix, one vector per lane. If rows are narrow,
/// several such groups (splits) alternate over the entries of a piece, and their sums are added at
/// the end in a fixed order:
///
///   entries      e0     e1     e2     e3          splits = 2, lanes = 4
///   thread     0 1 2 3       0 1 2 3                (lane 0 ... 3 of split 0)
///                     4 5 6 7       4 5 6 7         (lane 0 ... 3 of split 1)
///
/// All pieces of one tile of columns start before the pieces of the next tile, so that pieces with
/// the same rows of the dense matrix find them in the caches.
struct SpmmWork {
  int lanes_log2;
  Units units;
  int64_t blocks_per_tile;
  int64_t tiles;
};

struct SpmmPlan {
  Access access;
  int lanes;  // elements of the widest vectors that rows consist of
  SpmmWork work;
  int64_t blocks;
  int64_t chunks;  // of all matrices; if not 0, a second kernel adds the parts of long rows
  int64_t shares;  // blocks of a chunk in that kernel

  const char* why() const {
    if (access == Access::kColumns) return "Few entries: a copy of the dense matrix takes longer.";
    return access == Access::kRows
               ? "A group of lanes reads a row of the dense matrix in vectors."
               : "Rows of single elements or pairs: a warp reads them, spaced by a warp.";
  }
};

/// Whether enough warps for the GPU remain if each thread has `lanes` spaced elements.
inline bool is_spaced(const Spmm& p, int lanes) {
  constexpr int64_t kFewWarps = 1024;
  return p.column_stride == 1 && p.width > 2 * kWarpLanes &&
         p.batch * p.pattern.rows * ceil_div(p.width, lanes * kWarpLanes) >= kFewWarps;
}

/// Chunks of entries: kUsual entries each, or fewer if there are few long rows, as in the transpose
/// of a tall matrix, because the warps of few rows would leave most of the GPU idle. A thread adds
/// the parts of a row one after the other, so the chunks of longer rows are larger.
inline Chunks spmm_chunks(const CsrPattern& pattern, int64_t tiles, int lanes_log2) {
  constexpr int64_t kUsual = 512;   // fewer entries take less time than the search for their rows
  constexpr int64_t kWarps = 4096;  // about as many as a GPU runs at a time
  const int least = std::min(128, 1024 >> lanes_log2);  // 4 steps of a warp down to 1
  if (4 * pattern.rows * tiles >= kWarps ||
      pattern.entries <= std::min(256, 4 * least) * pattern.rows)
    return make_chunks(pattern, kUsual);
  int64_t size = least;
  while (size < kUsual && (size * kWarps < pattern.entries * tiles ||
                           2 * size * size * pattern.rows < pattern.entries))
    size *= 2;
  return {size, ceil_div(pattern.entries, size)};
}

/// `vector`: elements of a row per thread.
inline SpmmWork make_work(const Spmm& p, int vector, Access access) {
  SpmmWork work{};
  const int64_t vectors = ceil_div(p.width, vector);
  // Few columns per tile, so that memory sectors which several rows use are found in the caches.
  const int most_log2 = p.column_stride == 1 ? 5 : 1;
  while (work.lanes_log2 < most_log2 && 1 << work.lanes_log2 < vectors) ++work.lanes_log2;
  if (access == Access::kSpaced) work.lanes_log2 = kWarpLog2;
  const int64_t mean = p.pattern.entries / p.pattern.rows;
  // Two splits of 16 lanes each, if lanes 16 to 31 would read nothing in the last tile.
  const bool is_half = vectors > 32 && vectors <= 128 && (vectors - 1) % 32 < 16;
  if (access == Access::kRows && is_half && mean >= 16) --work.lanes_log2;
  work.tiles = ceil_div(vectors, 1 << work.lanes_log2);
  // One warp per row if each split then has several entries: rows of different lengths do not wait
  // for each other.
  work.units.chunks = spmm_chunks(p.pattern, work.tiles, work.lanes_log2);
  int splits_log2 = 0;
  while (work.lanes_log2 + splits_log2 < 5 && 4 << splits_log2 <= mean) ++splits_log2;
  work.units.group_log2 = work.lanes_log2 + splits_log2;
  work.blocks_per_tile = ceil_div(thread_count(p.pattern, work.units, kWarpLog2), kSpmmThreads);
  return work;
}

inline int lanes_of(const Spmm& p) {
  if (p.column_stride != 1) {
    const int lanes = vector_lanes(p.dtype);
    return rows_in_vectors(p.out, lanes, {p.width}) ? lanes : 1;
  }
  return std::min(sparse::lanes_of(p.dense, p.width, p.dtype),
                  sparse::lanes_of({p.out, p.width, 0}, p.width, p.dtype));
}

/// The plan of a product that has results.
inline SpmmPlan choose(const Spmm& p) {
  SpmmPlan plan{};
  plan.lanes = lanes_of(p);
  const int widest = vector_lanes(p.dtype);
  // Vectors of two 2-byte elements are spaced, too, if a warp does little more than finding its
  // row.
  const bool is_short = 4 * plan.lanes <= widest && p.pattern.entries < 4 * p.pattern.rows;
  const bool spaced = (plan.lanes == 1 || is_short) && is_spaced(p, widest);
  plan.access = spaced ? Access::kSpaced : p.column_stride != 1 ? Access::kColumns : Access::kRows;
  plan.work = make_work(p, spaced ? widest : plan.lanes, plan.access);
  plan.blocks = plan.work.blocks_per_tile * plan.work.tiles * p.batch;
  plan.chunks = plan.work.units.chunks.count * p.batch;
  // Several blocks per chunk only if there are few chunks: a block of a chunk without a long row
  // does no work.
  if (plan.chunks > 0)
    plan.shares =
        std::min(ceil_div(p.width, kSpmmThreads), std::max(2048 / plan.chunks, int64_t{1}));
  return plan;
}

/// The loads that a group of kLanes threads has in flight: each thread loads kSteps vectors for
/// each of kUnroll entries.
struct Narrow {
  static constexpr int kLanes = 8, kUnroll = 8, kSteps = 1;
};
struct Wide {
  static constexpr int kLanes = 32, kUnroll = 4, kSteps = 4;
};

/// The base-2 logarithm of the threads per chunk: as many as a row has if rows are wide, else a
/// warp.
template <class Flight>
TORCHKILN_HOST_DEVICE int chunk_log2_of(const Units& units) {
  return Flight::kSteps > 1 ? units.group_log2 : kWarpLog2;
}

/// Blocks per SM. Narrow rows of float32 take 72 registers per thread, wide rows 128. Other types
/// need more: 2-byte types convert 8 rows of 16 bytes to 32 bytes each.
template <class Flight>
constexpr int sampled_blocks(size_t bytes) {
  if (Flight::kSteps > 1) return bytes == sizeof(float) ? 4 : 3;
  return bytes == sizeof(float) ? 7 : 5;
}

/// Threads of a block that computes one entry.
inline constexpr int kEntryThreads = 256;
/// One block per entry, if rows have at least kLeastWidthOfEntries columns and there are at most
/// kMostEntries entries. A warp would need several steps for such a row, and so few warps leave SMs
/// idle.
inline constexpr int64_t kLeastWidthOfEntries = 2048;
inline constexpr int64_t kMostEntries = 512;
/// With at most this many entries, pieces are smaller: otherwise groups of eight lanes would leave
/// most of the GPU idle.
inline constexpr int64_t kFewEntries = 1 << 15;
/// With more rows than this, and a warp per row, all warps of a GPU have several rows.
inline constexpr int64_t kFewRows = 1 << 12;
/// Maximum number of vectors per row that eight lanes read. The second limit applies if entries and
/// rows are few.
inline constexpr int64_t kMostNarrowVectors = 64;
inline constexpr int64_t kMostNarrowVectorsOfFew = 16;

struct EntriesPlan {
  static constexpr const char* kWhy =
      "Few entries with wide rows, or elements that are far apart: a block each.";
  int64_t blocks;
};

template <class OfRows>
struct PiecesPlan {
  using Flight = OfRows;
  static constexpr const char* kWhy =
      Flight::kSteps > 1 ? "A warp or more reads a row, four vectors of four entries at a time."
                         : "Eight lanes read a row; eight entries are in flight.";
  Units units;
  int64_t blocks_per_matrix;
  int64_t blocks;
};

using SampledPlan = std::variant<EntriesPlan, PiecesPlan<Narrow>, PiecesPlan<Wide>>;

inline bool has_block_per_entry(const SampledProduct& p) {
  return p.column_stride != 1 ||
         (p.batch == 1 && p.pattern.entries <= kMostEntries && p.width >= kLeastWidthOfEntries);
}

/// The base-2 logarithm of the number of threads that share a row of mean length. They process the
/// row in two or more steps, or in about one step if there are few entries. kLanes << k threads
/// process kUnroll << k entries per step.
template <class Flight>
int group_log2_of(const CsrPattern& pattern, int least, int most) {
  const int64_t mean = pattern.entries / pattern.rows;
  const int64_t wanted = pattern.entries <= kFewEntries ? 3 * mean / 2 - 1 : mean / 2;
  int group_log2 = least;
  while (group_log2 < most && int64_t{Flight::kUnroll} << (group_log2 - least) <= wanted)
    ++group_log2;
  return group_log2;
}

/// Pieces of sampled products need no sum over pieces, so they may be short. If there are few
/// entries, though at least as many as rows, a piece takes one or two steps of a chunk's threads.
inline Chunks sampled_chunks(const CsrPattern& pattern, int64_t few, int64_t many) {
  if (pattern.entries > kFewEntries || pattern.entries < pattern.rows)
    return make_chunks(pattern, many);
  if (pattern.entries <= few || has_short_rows(pattern, few)) return {few, 0};
  return {few, ceil_div(pattern.entries, few)};
}

inline Units units_of(const CsrPattern& pattern, Narrow) {
  return {sampled_chunks(pattern, 4 * Narrow::kUnroll, 512), group_log2_of<Narrow>(pattern, 3, 5)};
}

/// Several warps per row, as long as each of them has a few steps.
inline Units units_of(const CsrPattern& pattern, Wide) {
  const int group_log2 = group_log2_of<Wide>(pattern, kWarpLog2, 12);
  const int64_t few = int64_t{2 * Wide::kUnroll} << (group_log2 - kWarpLog2);
  return {sampled_chunks(pattern, few, 64), group_log2};
}

template <class Flight>
PiecesPlan<Flight> make_pieces(const SampledProduct& p) {
  PiecesPlan<Flight> plan{units_of(p.pattern, Flight{}), 0, 0};
  plan.blocks_per_matrix = ceil_div(
      thread_count(p.pattern, plan.units, chunk_log2_of<Flight>(plan.units)), kSpmmThreads);
  plan.blocks = plan.blocks_per_matrix * (p.summed ? 1 : p.batch);
  return plan;
}

inline int lanes_of(const SampledProduct& p) {
  return std::min(sparse::lanes_of(p.left, p.width, p.dtype),
                  sparse::lanes_of(p.right, p.width, p.dtype));
}

/// The plan of a gradient that has results.
inline SampledPlan choose(const SampledProduct& p) {
  if (has_block_per_entry(p)) return EntriesPlan{p.pattern.entries};
  const bool are_few = p.pattern.entries <= kFewEntries && p.pattern.rows <= kFewRows;
  const int64_t most = are_few ? kMostNarrowVectorsOfFew : kMostNarrowVectors;
  if (ceil_div(p.width, lanes_of(p)) > most) return make_pieces<Wide>(p);
  return make_pieces<Narrow>(p);
}

}  // namespace torchkiln::cuda
