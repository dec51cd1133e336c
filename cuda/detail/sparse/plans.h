#pragma once

// How the rows of a sparse matrix are shared among threads: csr_split.cuh draws it. Includes no
// header of CUDA.

#include "torchkiln/device/alignment.h"
#include "torchkiln/kernels/spmm.h"

namespace torchkiln::sparse {
using namespace device;

struct Chunks {
  int64_t size;
  int64_t count;  // 0: no row is long
};

/// A row is long if it has more entries than `least` and several times the mean length, so that
/// the pieces of an even matrix are its rows.
inline Chunks make_chunks(const CsrPattern& pattern, int64_t least) {
  constexpr int64_t kMax = 4096;
  int64_t size = least;
  while (size < kMax && size * pattern.rows < 2 * pattern.entries) size *= 2;
  return {size, pattern.entries > size ? ceil_div(pattern.entries, size) : 0};
}

/// Assignment of threads: the first groups of 1 << chunk_log2 threads, a warp or more, have one
/// chunk each; all further threads work on rows, in groups of 1 << group_log2 threads.
struct Units {
  Chunks chunks;
  int group_log2;
};

inline int64_t thread_count(const CsrPattern& pattern, const Units& units, int chunk_log2) {
  return (units.chunks.count << chunk_log2) + (pattern.rows << units.group_log2);
}

/// Elements of the widest vectors that rows can be read in.
inline int lanes_of(const DenseRows& rows, int64_t width, Dtype dtype) {
  return widest_lanes(rows.data, dtype, {width, rows.row_stride, rows.batch_stride});
}

}  // namespace torchkiln::sparse
