#pragma once

// Rows of a sparse matrix as pieces of work. A row of up to `size` entries is one piece. A longer
// one is cut where the entries of the matrix are, every `size` of them, so that one long row does
// not keep a whole launch waiting:
//
//   entries  |      chunk 0      |      chunk 1      |      chunk 2      |
//   rows     | r0 | r1 | long row ........................... | r3 | r4  |
//   pieces     r0   r1   0, tail       1, head          2, head  r3   r4
//
// A chunk has a piece of at most two long rows: that of its first entry (head) and another that
// begins inside of it and goes on (tail). A warp looks after each chunk, a group of threads after
// each row. Nothing has to be counted before the launch, however the entries are distributed.

#include "torchkiln/device/launch.cuh"
#include "torchkiln/device/warp.cuh"
#include "torchkiln/kernels/spmm.h"

namespace torchkiln::sparse {
using namespace device;

struct Chunks {
  int64_t size;
  int64_t count;  // 0 where no row can be long
};

/// Long is a row of several times the mean length: so the pieces of an even matrix are its rows.
inline Chunks cut_into_chunks(const CsrPattern& pattern) {
  constexpr int64_t kLeast = 512;  // entries that outweigh the search for their rows
  constexpr int64_t kMost = 4096;
  int64_t size = kLeast;
  while (size < kMost && size * pattern.rows < 2 * pattern.entries) size *= 2;
  return {size, pattern.entries > size ? ceil_div(pattern.entries, size) : 0};
}

/// Who works on what: the first warps on chunks, the threads of all others on rows, in groups of
/// 1 << group_log2 within a warp.
struct Units {
  Chunks chunks;
  int group_log2;
};

inline int64_t thread_count(const CsrPattern& pattern, const Units& units) {
  return kWarpLanes * units.chunks.count + (pattern.rows << units.group_log2);
}

template <class Index>
struct Piece {
  int row = -1;  // -1: there is nothing to do
  Index begin = 0;
  Index end = 0;
  int64_t slot = -1;  // of the partial result of a long row; -1: the piece is a row
};

/// The row of an entry: the last that begins at it or before. A warp looks at 32 rows at a time.
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

/// Where the part of a long row lies that is in this chunk.
__device__ __forceinline__ int64_t slot_of(const Chunks& chunks, int64_t chunk, int64_t row_begin) {
  return 2 * chunk + (row_begin > chunk * chunks.size ? 1 : 0);
}

/// The head or the tail of a chunk, if it has one; a warp asks together.
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

/// A row that is not long.
template <class Index>
__device__ __forceinline__ Piece<Index> piece_of_row(const CsrPattern& pattern, const Index* crow,
                                                     const Chunks& chunks, int64_t row) {
  if (row >= pattern.rows) return {};
  const Index begin = crow[row];
  const Index end = crow[row + 1];
  if (chunks.count > 0 && end - begin > chunks.size) return {};
  return {static_cast<int>(row), begin, end, -1};
}

/// Calls body(piece, group_log2) for what the thread has to do; the threads of a warp come
/// together, whether there is something or not.
template <class Index, class Body>
__device__ __forceinline__ void for_each_piece(const CsrPattern& pattern, const Index* crow,
                                               const Units& units, int64_t thread,
                                               const Body& body) {
  const int64_t warp = thread / kWarpLanes;
  const bool is_chunk = warp < units.chunks.count;
  for (int part = 0; part < (is_chunk ? 2 : 1); ++part) {
    if (is_chunk) {
      body(piece_of_chunk(pattern, crow, units.chunks, warp, part == 1), 5);
    } else {
      const int64_t row = (thread - kWarpLanes * units.chunks.count) >> units.group_log2;
      body(piece_of_row(pattern, crow, units.chunks, row), units.group_log2);
    }
  }
}

}  // namespace torchkiln::sparse
