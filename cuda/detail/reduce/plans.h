#pragma once

// How sums are split among blocks. Depends on shape, strides, alignment and device only, and
// includes no header of CUDA.
//
//   columns::Plan   sums over the rows of a matrix, as for the gradient of a bias: columns.cuh
//   rows::Plan      one sum for each row: rows.cuh

#include <algorithm>
#include <cstddef>

#include "torchkiln/device/alignment.h"

namespace torchkiln::reduce {
using namespace device;

/// The number of parts per task. `tasks` equal tasks are split into at most `most` parts each, so
/// that the blocks fill at least 90 % of their waves if possible: 1.1 waves take as long as 2.
/// `wave`: blocks that run at the same time.
inline int64_t parts_filling_waves(int64_t tasks, int64_t most, int64_t wave) {
  constexpr int64_t kMaxWaves = 8;  // with more, the last wave is a small share
  int64_t parts = 1;
  for (int64_t waves = 1; waves <= kMaxWaves; ++waves) {
    parts = waves * wave / tasks;
    if (parts >= most || parts * tasks * 10 >= waves * wave * 9) break;
  }
  if (parts > most) parts = most;
  return parts < 1 ? 1 : parts;
}

namespace columns {

inline constexpr int kThreads = 256;
// Threads along a row: one warp, which reads 512 bytes of it at a time. The other warps of the
// block read other rows. Their sums are added in shared memory and need no further partial sums.
inline constexpr int kThreadsX = 32;
// Fewest threads along a row. Tiles are that narrow if there are few rows; 128 bytes are a cache
// line.
inline constexpr int kMinThreadsX = 8;
// Fewest rows per thread. With fewer, the partial sums take more time than further blocks save.
inline constexpr int kMinRows = 4;
// Maximum number of rows per thread with a single chunk: two or three steps of loads take less time
// than a second kernel.
inline constexpr int kSinglePassRows = 16;
// Blocks per SM: 2 x 256 threads x 8 loads x 16 B = 64 KiB in flight. A third block would exceed
// the registers of an SM and run as a second wave.
inline constexpr int kBlocksPerMultiprocessor = 2;

// Shortest row, if there is only one, for which elementwise kernels take less time: its elements
// are the sums. Here a thread would have only one vector, or one element, in flight.
inline constexpr int64_t kLongRow = int64_t{1} << 18;

/// The distribution of a [rows, columns] problem over threads and blocks. Depends only on shape,
/// vector width and device.
struct Plan {
  int threads_x;   // threads along a row
  int threads_y;   // rows that a block reads at a time; threads_x * threads_y <= kThreads
  int64_t tiles;   // blocks along a row
  int64_t chunks;  // blocks that share the rows; each writes one row of partial sums
  int64_t rows;
  int64_t columns;
  // If fold > 1, a row of the problem is made of `fold` consecutive shorter rows of `period`
  // columns, whose sums finish() adds. With a batch of problems, several such rows lie side by
  // side.
  int fold = 1;
  int64_t period = 0;

  TORCHKILN_HOST_DEVICE bool is_single_pass() const { return chunks == 1 && fold == 1; }
};

/// `blocks`: resident blocks per SM.
inline Plan make_plan(int64_t rows, int64_t columns, int lanes, int blocks, const Device& device) {
  Plan plan{1, 1, 1, 1, rows, columns};
  const int64_t wave = int64_t{device.multiprocessors} * blocks;
  const int64_t vectors = ceil_div(columns, lanes);
  int64_t threads_x = kThreadsX;
  // If there are few rows, and enough columns for every SM, all threads are along the row. Each has
  // the loads of all its rows in flight, and no sums are added in shared memory.
  while (threads_x < kThreads && rows < kSinglePassRows * (kThreads / threads_x) &&
         vectors >= 2 * threads_x * wave) {
    threads_x *= 2;
  }
  plan.tiles = threads_x == kThreads ? ceil_div(vectors, threads_x) : vectors / threads_x;
  if (plan.tiles < 1) plan.tiles = 1;
  // Tiles of equal width: 33 vectors become one tile of 33, not a tile of 32 and one of a single
  // vector.
  plan.threads_x = static_cast<int>(ceil_div(vectors, plan.tiles));
  plan.threads_y = kThreads / plan.threads_x;
  // With too few rows for several chunks, narrower tiles occupy more SMs, with fewer rows per
  // thread.
  while (rows > plan.threads_y && rows <= int64_t{plan.threads_y} * kSinglePassRows &&
         plan.threads_x >= 2 * kMinThreadsX && plan.tiles * 2 <= wave) {
    plan.tiles *= 2;
    plan.threads_x = static_cast<int>(ceil_div(vectors, plan.tiles));
    plan.threads_y = kThreads / plan.threads_x;
  }
  if (rows > int64_t{plan.threads_y} * kSinglePassRows) {
    const int64_t most = ceil_div(rows, int64_t{plan.threads_y} * kMinRows);
    plan.chunks = parts_filling_waves(plan.tiles, most, wave);
  }
  return plan;
}

/// Bytes of partial sums: 0 if a single chunk writes the result itself.
inline size_t partial_bytes(const Plan& plan, size_t size_of_sum) {
  return plan.is_single_pass() ? 0 : static_cast<size_t>(plan.chunks * plan.columns) * size_of_sum;
}

}  // namespace columns

namespace rows {

inline constexpr int kThreads = 256;
// Loads in flight per thread.
inline constexpr int kLoads = 8;
// Resident blocks per SM: 4 x 256 threads x 8 loads x 16 B = 128 KiB in flight, three times as much
// as the latency requires.
inline constexpr int kBlocksPerMultiprocessor = 4;
// Rows in flight per thread of a packed kernel.
inline constexpr int kPackedRows = 8;
inline constexpr int kTileBytes = 16 * 1024;
// Longest row of a staged tile of 16 KiB. Such a tile has 16 rows, so 16 of 256 threads share a
// row.
inline constexpr int kStagedRowBytes = kTileBytes / 16;
// Smallest staged tile. A quarter of the threads load one vector each.
inline constexpr int kFewestTileBytes = 1024;
// Bytes of a row per thread if there are many rows, so that all loads of a row are in flight
// together. With more bytes per thread, some SMs would finish their last rows late.
inline constexpr int kThreadRowBytes = kLoads * kVectorBytes;
// Shortest row that a block sums. In shorter rows, half of its 256 threads would have no load, so a
// warp sums them.
inline constexpr int kBlockRowBytes = 2 * 1024;
// Longest row that one block sums. Longer rows are split into parts of at least kMinPartBytes, and
// a second kernel adds the sums of the parts.
inline constexpr int64_t kSinglePassBytes = 64 * 1024;
inline constexpr int64_t kMinPartBytes = 16 * 1024;

enum class Kind { packed_vectors, packed_elements, staged, warp_per_row, block_per_row };

/// The distribution of rows over threads. Depends only on shape, strides, alignment and device.
struct Plan {
  Kind kind;
  int threads = kThreads;  // per block
  int64_t parts = 1;       // per row
  int64_t part_length = 0;
  int64_t tile = 0;  // staged rows per block
};

/// A grid [outer, inner] of rows in `in`, with a stride for each dimension.
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

  /// Whether every row consists of whole 16-byte vectors.
  bool in_vectors() const {
    return stride == 1 &&
           rows_in_vectors(in, kVectorBytes / size_of_element,
                           {length, outer == 1 ? 0 : outer_stride, inner == 1 ? 0 : inner_stride});
  }

  /// Elements from each row to the next one; 0 if the distances differ.
  int64_t pitch() const { return outer == 1 ? inner_stride : inner == 1 ? outer_stride : 0; }

  /// Whether each row begins where the previous one ends.
  bool is_dense() const { return stride == 1 && pitch() == length; }

  /// Whether gaps between the rows take at most a fifth of the memory.
  bool has_small_gaps() const {
    return stride == 1 && pitch() > length && pitch() * 4 <= length * 5;
  }
};

/// Rows of a staged tile: at most kTileBytes, and fewer if the blocks would not fill the GPU. A
/// multiple of eight rows gives all tiles the same offset from a 16-byte boundary.
inline int64_t rows_of_tile(const Shape& shape, const Device& device) {
  const int64_t bytes = shape.pitch() * shape.size_of_element;
  const int64_t blocks = int64_t{device.multiprocessors} * kBlocksPerMultiprocessor;
  const int64_t least = std::max(ceil_div(shape.count(), blocks), kFewestTileBytes / bytes);
  return std::min(kTileBytes / bytes / 8, ceil_div(least, 8)) * 8;
}

inline Plan make_plan(const Shape& shape, const Device& device) {
  const int64_t multiprocessors = device.multiprocessors;
  const int64_t bytes = shape.length * shape.size_of_element;
  // Few rows are not packed if they are dense: with eight rows per thread most SMs would be idle.
  const bool packs = shape.in_vectors() && bytes <= kWarpLanes * kVectorBytes;
  const bool many = shape.count() >= multiprocessors * kPackedRows * 8;
  if (packs && (many || !shape.is_dense())) return {Kind::packed_vectors};
  const bool is_close = shape.is_dense() || (shape.has_small_gaps() && !shape.in_vectors());
  if (is_close && shape.pitch() * shape.size_of_element <= kStagedRowBytes)
    return {Kind::staged, kThreads, 1, 0, rows_of_tile(shape, device)};
  if (shape.length <= kWarpLanes) return {Kind::packed_elements};
  const bool warps_fill = shape.count() >= multiprocessors * 32;
  if (bytes <= kBlockRowBytes || (warps_fill && bytes <= kWarpLanes * kThreadRowBytes))
    return {Kind::warp_per_row};
  Plan plan{Kind::block_per_row, kThreads, 1, shape.length};
  while (warps_fill && bytes <= plan.threads / 2 * kThreadRowBytes) plan.threads /= 2;
  if (bytes <= kSinglePassBytes) return plan;
  plan.parts = parts_filling_waves(shape.count(), ceil_div(bytes, kMinPartBytes),
                                   multiprocessors * kBlocksPerMultiprocessor);
  if (plan.parts == 1) return plan;
  constexpr int64_t kMultiple = 256;  // keeps the parts of an aligned row aligned
  plan.part_length = ceil_div(ceil_div(shape.length, plan.parts), kMultiple) * kMultiple;
  plan.parts = ceil_div(shape.length, plan.part_length);
  return plan;
}

inline size_t partial_bytes(const Shape& shape, const Plan& plan) {
  return plan.parts == 1 ? 0 : static_cast<size_t>(shape.count() * plan.parts) * sizeof(double);
}

}  // namespace rows
}  // namespace torchkiln::reduce
