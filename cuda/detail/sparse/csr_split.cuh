#pragma once

// Rows of a sparse matrix as pieces of work. A row of up to `size` entries is one piece. A longer
// row is split at multiples of `size` entries of the matrix, so that one long row does not delay a
// whole launch:
//
//   entries  |      chunk 0      |      chunk 1      |      chunk 2      |
//   rows     | r0 | r1 | long row ........................... | r3 | r4  |
//   pieces     r0   r1   0, tail       1, head          2, head  r3   r4
//
// A chunk has pieces of at most two long rows: the row of its first entry (head), and a row that
// begins inside the chunk and continues after it (tail). A warp or more work on each chunk, a group
// of threads on each row. This needs no counting before the launch, whatever the row lengths are.

#include "detail/sparse/plans.h"
#include "torchkiln/device/launch.cuh"
#include "torchkiln/device/warp.cuh"

namespace torchkiln::sparse {
using namespace device;

/// The array of row begins of a matrix, and the array of its column indices.
template <class Index>
__device__ __forceinline__ const Index* begins_of(const CsrPattern& pattern, int64_t matrix) {
  return static_cast<const Index*>(pattern.crow) + matrix * pattern.crow_batch_stride;
}
template <class Index>
__device__ __forceinline__ const Index* columns_of(const CsrPattern& pattern, int64_t matrix) {
  return static_cast<const Index*>(pattern.col) + matrix * pattern.col_batch_stride;
}

template <class Index>
struct Piece {
  int row = -1;  // -1 if there is no work
  Index begin = 0;
  Index end = 0;
  int64_t slot = -1;  // for a partial result of a long row; -1: the piece is a whole row
};

/// The row of an entry: the last row whose begin is not after the entry. A warp tests 32 rows at a
/// time.
template <class Index>
__device__ __forceinline__ int row_of(const Index* crow, int rows, int64_t entry) {
  int low = 0;
  int high = rows;
  while (high - low > 1) {
    const int step = (high - low + kWarpLanes - 1) / kWarpLanes;
    const int64_t probe = low + int64_t{step} * (static_cast<int>(threadIdx.x % kWarpLanes) + 1);
    const bool is_before = probe < high && crow[probe] <= entry;
    low += step * __popc(__ballot_sync(~0u, is_before));
    high = min(low + step, high);
  }
  return low;
}

/// The row of an entry that lies in one of the rows first <= row <= last.
template <class Index>
__device__ __forceinline__ int row_between(const Index* crow, int first, int last, int64_t entry) {
  for (++last; last - first > 1;) {
    const int middle = first + (last - first) / 2;
    (crow[middle] <= entry ? first : last) = middle;
  }
  return first;
}

/// The index of the slot for the partial result of a long row in this chunk. The row begins at
/// entry `row_begin`.
__device__ __forceinline__ int64_t slot_of(const Chunks& chunks, int64_t chunk, int64_t row_begin) {
  return 2 * chunk + (row_begin > chunk * chunks.size ? 1 : 0);
}

/// The piece of a chunk, its head or its tail, if it has one. All threads of a warp must call it.
template <class Index>
__device__ __forceinline__ Piece<Index> piece_of_chunk(const CsrPattern& pattern, const Index* crow,
                                                       const Chunks& chunks, int64_t chunk,
                                                       bool is_tail) {
  const int64_t first = chunk * chunks.size;
  const int64_t last = min(first + chunks.size, pattern.entries);
  const int row = row_of(crow, static_cast<int>(pattern.rows), is_tail ? last - 1 : first);
  const int64_t begin = crow[row];
  const int64_t end = crow[row + 1];
  if (end - begin <= chunks.size || is_tail != (begin > first)) return {};
  return {row, static_cast<Index>(max(begin, first)), static_cast<Index>(min(end, last)),
          slot_of(chunks, chunk, begin)};
}

/// The piece of a row; empty for a long row.
template <class Index>
__device__ __forceinline__ Piece<Index> piece_of_row(const CsrPattern& pattern, const Index* crow,
                                                     const Chunks& chunks, int64_t row) {
  if (row >= pattern.rows) return {};
  const Index begin = crow[row];
  const Index end = crow[row + 1];
  if (chunks.count > 0 && end - begin > chunks.size) return {};
  return {static_cast<int>(row), begin, end, -1};
}

/// Calls body(piece, group_log2) for each piece of the thread. All threads of a warp call body
/// together, even for empty pieces.
template <class Index, class Body>
__device__ __forceinline__ void for_each_piece(const CsrPattern& pattern, const Index* crow,
                                               const Units& units, int chunk_log2, int64_t thread,
                                               const Body& body) {
  const int64_t chunk = thread >> chunk_log2;
  const bool is_chunk = chunk < units.chunks.count;
  for (int part = 0; part < (is_chunk ? 2 : 1); ++part) {
    if (is_chunk) {
      body(piece_of_chunk(pattern, crow, units.chunks, chunk, part == 1), chunk_log2);
    } else {
      const int64_t row = (thread - (units.chunks.count << chunk_log2)) >> units.group_log2;
      body(piece_of_row(pattern, crow, units.chunks, row), units.group_log2);
    }
  }
}

}  // namespace torchkiln::sparse
