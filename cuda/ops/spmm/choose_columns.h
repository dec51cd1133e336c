#pragma once

// The plan of a product with the transpose of a sparse matrix of few columns: columns.cu has the
// kernel. Includes no header of CUDA.

#include <algorithm>

#include "detail/sparse/plans.h"

namespace torchkiln::cuda {

using namespace device;
using namespace sparse;

inline constexpr int kColumnsThreads = 128;
inline constexpr int kColumnsBlocks = 4;  // per SM: 128 registers per thread, half of them for sums

// A thread has the sums of all columns for one vector of x: up to kFewestSums columns, or else
// kMostSums. With more columns, vectors are shorter.
inline constexpr int kFewestSums = 8;
inline constexpr int kMostSums = 32;
inline constexpr int kMostBytesOfMany = 8;  // sums of one column, if there are more

/// Rows whose weights are in shared memory.
constexpr int stage_rows(int columns) { return columns > kFewestSums ? 64 : kColumnsThreads; }
/// Rows of x in flight per thread. Four blocks of 128 threads with four vectors of 16 bytes each
/// are 32 KiB per SM.
constexpr int rows_in_flight(int bytes) { return bytes >= 8 ? 4 : 8; }
/// Sums that are added over the warps of a block at a time: 32 bytes per thread.
constexpr int sums_at_a_time(size_t size) { return static_cast<int>(32 / size); }

struct ColumnsPlan {
  static constexpr const char* kWhy =
      "Few columns: a pass over the rows, without a transposed pattern.";
  int lanes;       // elements of a vector
  int columns;     // kFewestSums or kMostSums
  int lanes_log2;  // of the threads that share a row of x
  int64_t tiles;   // blocks along a row
  int64_t chunks;  // blocks that share the rows; if there are several, a second kernel adds them
  int64_t rows;    // per chunk
};

/// The base-2 logarithm of the threads for `vectors` of a row: all threads of a block, or fewer if
/// this leaves fewer threads without a vector in the last tile.
inline int row_lanes_log2(int64_t vectors) {
  int found = 0;
  while (found < 5 && int64_t{1} << found < vectors) ++found;
  const auto idle = [&](int log2) { return ceil_div(vectors, int64_t{1} << log2) << log2; };
  for (int log2 = 6; vectors > kWarpLanes && 1 << log2 <= kColumnsThreads; ++log2)
    if (idle(log2) <= idle(found)) found = log2;
  return found;
}

inline ColumnsPlan choose(const SpmmColumns& p, const Device& device) {
  // kSmallBytes of partial sums are written and read again in about a microsecond. More bytes are
  // allowed only if they are few compared to x: with at least kRowsOfSum rows of x per row of sums.
  constexpr int64_t kSmallBytes = int64_t{4} << 20, kRowsOfSum = 8;
  const int64_t rows = p.pattern.rows, columns = p.pattern.columns;
  const auto sum = static_cast<int64_t>(std::max(size_of(p.dtype), sizeof(float)));
  ColumnsPlan plan{};
  plan.columns = columns <= kFewestSums ? kFewestSums : kMostSums;
  plan.lanes = std::min(sparse::lanes_of(p.x, p.width, p.dtype),
                        sparse::lanes_of({p.out, p.width, 0}, p.width, p.dtype));
  if (plan.columns > kFewestSums)
    plan.lanes = std::min(plan.lanes, kMostBytesOfMany / static_cast<int>(sum));
  const int64_t vectors = ceil_div(p.width, plan.lanes);
  plan.lanes_log2 = row_lanes_log2(vectors);
  plan.tiles = ceil_div(vectors, int64_t{1} << plan.lanes_log2);
  const int bytes = plan.lanes * static_cast<int>(size_of(p.dtype));
  const int64_t step = int64_t{kColumnsThreads >> plan.lanes_log2} * rows_in_flight(bytes);
  const int64_t bounded =
      std::max(rows / (kRowsOfSum * columns), kSmallBytes / (columns * p.width * sum));
  const int64_t fills = device.multiprocessors * int64_t{kColumnsBlocks} / plan.tiles;
  plan.chunks = std::max<int64_t>(std::min({fills, bounded, ceil_div(rows, step)}), 1);
  plan.rows = ceil_div(rows, plan.chunks);
  plan.chunks = ceil_div(rows, plan.rows);
  return plan;
}

}  // namespace torchkiln::cuda
