#pragma once

// Selects the kernel of softmax: forward.cu and backward.cu have the tables. Includes no header of
// CUDA.

#include <optional>
#include <variant>

#include "detail/rowwise/plans.h"
#include "torchkiln/kernels/softmax.h"

namespace torchkiln::cuda {

using namespace device;
using namespace rowwise;

/// Threads of a block in a cluster. Small blocks are scheduled sooner.
inline constexpr int kSoftmaxClusterThreads = kRowThreads / 2;
/// Blocks per SM of the kernel for parts of rows: 64 registers per thread.
inline constexpr int kSoftmaxPartBlocks = 4;
/// Vectors of a part per thread: kPartVectors of one tensor, kPartVectorsOfTwo of two tensors or of
/// one with a mask.
inline constexpr int kPartVectors = 8;
inline constexpr int kPartVectorsOfTwo = 4;

// A block of kStridedColumns x depth threads computes adjacent rows whose elements are not
// adjacent: each thread reads every depth-th element of its row.
inline constexpr int kStridedColumns = 32;
inline constexpr int kMaxStridedDepth = 32;
inline constexpr int64_t kDeepLength = 1024;
inline constexpr int64_t kShallowLength = 64;

// A tile is a group of adjacent rows in shared memory. In x their elements are not adjacent.
inline constexpr int kMaxTileThreads = 512;
inline constexpr int kMaxTileRows = 256;
/// Fewest rows of a tile: eight rows of float32 fill a memory access of 32 bytes.
inline constexpr int kMinTileRows = 8;
/// Maximum number of bytes per tile of more than kMinTileRows rows: an SM of 9.0 then holds two
/// blocks.
inline constexpr int kTwoTilesBytes = 96 * 1024;
/// Static shared memory of a block, in bytes: up to two numbers per row and one per thread.
inline constexpr int kTileStaticBytes = (kMaxTileThreads + 2 * kMaxTileRows) * 8;

// Short rows, each computed by threads of one warp.
inline constexpr int kShortThreads = 128;
inline constexpr int kShortItems = 4;                  // elements per thread, at most
inline constexpr int kSingleRows = 8 * kShortThreads;  // rows per block, if a row is one element
/// Rows per thread, if there are many rows. The bytes in flight of a single short row would not
/// hide the latency.
inline constexpr int kShortRows = 4;
/// Elements and rows of a thread if half as many threads then share a row: with 33 elements, 16
/// threads of kShortItems would leave half of their loads, shuffles and stores without an element.
inline constexpr int kMoreShortItems = 6;
inline constexpr int kFewerShortRows = 2;
/// Longest short row, in bytes.
inline constexpr int64_t kShortBytes = 96;
/// Short rows of whole vectors are read in vectors if they need more threads per SM than this.
inline constexpr int kFewThreads = 512;

/// The plan for rows that fit in the registers of a team. `masked`: the kernel with a mask, which
/// also supports any scale.
struct RegistersPlan {
  static constexpr const char* kWhy = "A team of threads holds the row: each element is read once.";
  RowPlan rows;
  Alignment alignment;
  bool masked;
};

/// The plan for rows that do not fit in the registers of a team.
struct PartsPlan {
  static constexpr const char* kWhy =
      "No team holds the row: blocks have a part each, whose second read hits L2.";
  PartPlan parts;
  Alignment alignment;
  bool masked;
};

/// The plan for rows whose elements are not adjacent.
struct StridedPlan {
  static constexpr const char* kWhy =
      "Elements are not adjacent: threads of a warp have a row each.";
  int64_t blocks;
  int depth;
};

/// The plan for rows whose elements are adjacent in y but not in x, if a tile of rows fits in
/// shared memory. Forward only.
struct TilePlan {
  static constexpr const char* kWhy =
      "Elements are not adjacent: a tile of rows in shared memory is read once.";
  int64_t blocks;
  int rows;   // per tile
  int depth;  // threads per row
  int pitch;  // elements from a row of the tile to the next one
  int bytes;  // per tile

  TORCHKILN_HOST_DEVICE int threads() const { return rows * depth; }
};

/// The plan for short rows that are not whole vectors, or are few.
struct ShortPlan {
  static constexpr const char* kWhy = "A row is short: threads of a warp share it.";
  int64_t blocks;
  int log_lanes;  // log2 of the threads per row
  int rows;       // per thread: 1, kShortRows or kFewerShortRows
};

using SoftmaxPlan = std::variant<RegistersPlan, PartsPlan, StridedPlan, TilePlan, ShortPlan>;

/// Whether scaling keeps -infinity and the order of numbers. Kernels without a mask require both.
inline bool keeps_order(double scale) { return scale > 1e-30 && scale < 1e30; }

inline Alignment alignment_of_rows(const Softmax& p) {
  const TensorRows tensors[] = {{p.x, p.outer_stride}, {p.y, p.length}};
  return alignment_of(tensors, p.dtype, p.outer, p.length);
}
inline Alignment alignment_of_rows(const SoftmaxBackward& p) {
  const TensorRows tensors[] = {{p.grad, p.outer_stride}, {p.y, p.length}, {p.grad_x, p.length}};
  return alignment_of(tensors, p.dtype, p.outer, p.length);
}

/// One warp for each row that would leave most of a second warp idle: more rows are in flight, and
/// no barrier is needed. Only if one tensor is read, because the vectors of two fill the registers.
inline std::optional<RowPlan> plan_warps(Dtype dtype, Alignment alignment, int64_t rows,
                                         int64_t columns, const Device& device) {
  constexpr int64_t kMostVectors = 5 * kWarpLanes;
  const int lanes = vector_lanes(dtype);
  const int64_t vectors =
      alignment == Alignment::vector ? ceil_div(columns, lanes) : inner_vectors(columns, lanes);
  const bool fits = vectors > kFewItems * kWarpLanes && vectors <= kMostVectors;
  if (alignment == Alignment::scalar || !fits ||
      rows < int64_t{device.multiprocessors} * kWarpLanes)
    return std::nullopt;
  return RowPlan{make_row_team(kWarpLanes, kRowThreads, 1), kManyItems};
}

/// `streams`: tensors that a thread holds.
template <class Problem>
SoftmaxPlan choose_rows(const Problem& p, Alignment alignment, int streams, bool masked,
                        const Device& device) {
  if (p.inner != 1 || (p.stride != 1 && p.length != 1)) {
    const int depth = p.length >= kDeepLength      ? kMaxStridedDepth
                      : p.length >= kShallowLength ? 8
                                                   : 2;
    return StridedPlan{ceil_div(p.outer * p.inner, kStridedColumns), depth};
  }
  std::optional<RowPlan> rows;
  if (streams == 1) rows = plan_warps(p.dtype, alignment, p.outer, p.length, device);
  if (!rows)
    rows = plan_rows(p.dtype, alignment, p.length, streams, kSoftmaxClusterThreads, device);
  if (rows) return RegistersPlan{*rows, alignment, masked};
  // If the offsets of rows differ, the kernel with a mask serves calls without one, too: fewer
  // instantiations.
  const bool takes_mask = masked || alignment == Alignment::scalar;
  const int vectors = streams > 1 || takes_mask ? kPartVectorsOfTwo : kPartVectors;
  return PartsPlan{
      make_part_plan(p.outer, p.length, vector_lanes(p.dtype), vectors, kSoftmaxPartBlocks, device),
      alignment, takes_mask};
}

/// Elements from a row of a tile to the next one: an odd number of 4-byte words, so that the rows
/// of adjacent threads are in different banks.
constexpr int tile_pitch(int length, int64_t size) {
  return size == 2 ? (length + 1) / 4 * 4 + 2 : length | 1;
}

template <class Problem>
std::optional<ShortPlan> make_short_plan(const Problem& p, Alignment alignment,
                                         const Device& device) {
  if (p.inner != 1 || p.mask.any() ||
      p.length * static_cast<int64_t>(size_of(p.dtype)) > kShortBytes)
    return std::nullopt;
  const int log_lanes = ceil_log2(static_cast<int>(ceil_div(p.length, kShortItems)));
  const int64_t threads = p.outer << log_lanes;
  const bool adjacent = p.stride == 1 || p.length == 1;
  if (adjacent && alignment == Alignment::vector &&
      threads > int64_t{kFewThreads} * device.multiprocessors)
    return std::nullopt;
  if (p.length == 1) return ShortPlan{ceil_div(p.outer, kSingleRows), 0, 1};
  const bool many = threads > int64_t{kShortRows * kFewThreads} * device.multiprocessors;
  if (!many) return ShortPlan{ceil_div(threads, kShortThreads), log_lanes, 1};
  const int fewer_lanes = ceil_log2(static_cast<int>(ceil_div(p.length, kMoreShortItems)));
  if (fewer_lanes == log_lanes || size_of(p.dtype) == 8)
    return ShortPlan{ceil_div(threads, kShortThreads * kShortRows), log_lanes, kShortRows};
  return ShortPlan{ceil_div(p.outer << fewer_lanes, kShortThreads * kFewerShortRows), fewer_lanes,
                   kFewerShortRows};
}

inline std::optional<TilePlan> make_tile_plan(const Softmax& p, const Device& device) {
  const int64_t size = static_cast<int64_t>(size_of(p.dtype));
  if (p.inner != 1 || p.stride == 1 || p.length == 1 || p.mask.any() ||
      p.length * size > most_strided_bytes(p.outer))
    return std::nullopt;
  const auto length = static_cast<int>(p.length);
  TilePlan plan{0, kStridedColumns, 1, 0, 0};
  plan.pitch = tile_pitch(length, size);
  constexpr int kElements = 8;  // fewest per thread
  while (plan.threads() < kMaxTileThreads && 2 * plan.depth * kElements <= length) plan.depth *= 2;
  while (plan.threads() < kMaxTileThreads / 2) plan.rows *= 2;
  const auto bytes = [&] { return plan.rows * plan.pitch * static_cast<int>(size); };
  while (plan.rows > kMinTileRows &&
         (bytes() > kTwoTilesBytes || ceil_div(p.outer, plan.rows) < device.multiprocessors)) {
    plan.rows /= 2;
    plan.depth *= 2;
  }
  plan.blocks = ceil_div(p.outer, plan.rows);
  plan.bytes = bytes();
  if (plan.bytes + kTileStaticBytes > device.shared_bytes) return std::nullopt;
  return plan;
}

inline SoftmaxPlan choose(const Softmax& p, Alignment alignment, const Device& device) {
  if (const auto tiles = make_tile_plan(p, device)) return *tiles;
  if (const auto short_rows = make_short_plan(p, alignment, device)) return *short_rows;
  return choose_rows(p, alignment, 1, p.mask.any() || !keeps_order(p.scale), device);
}

inline SoftmaxPlan choose(const SoftmaxBackward& p, Alignment alignment, const Device& device) {
  if (const auto short_rows = make_short_plan(p, alignment, device)) return *short_rows;
  return choose_rows(p, alignment, 2, p.mask.any(), device);
}

}  // namespace torchkiln::cuda
