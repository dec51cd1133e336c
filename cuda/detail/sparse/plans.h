#pragma once

// The distribution of the rows of a sparse matrix over threads; csr_split.cuh has a drawing.
// Includes no header of CUDA.

#include "torchkiln/device/alignment.h"
#include "torchkiln/kernels/spmm.h"

namespace torchkiln::sparse {
using namespace device;

struct Chunks {
  int64_t size;
  int64_t count;  // 0 if no row is long
};

/// Whether no row has more than `size` entries, unless indices repeat. Then chunks would search for
/// rows in vain, and the kernel that adds the parts of long rows would find none.
inline bool has_short_rows(const CsrPattern& pattern, int64_t size) {
  return pattern.columns <= size && pattern.entries <= pattern.rows * pattern.columns;
}

/// The chunks of a pattern. A chunk has `least` entries or, if that is less than twice the mean of
/// the rows, two to four times the mean, up to kMax. A row with more entries than a chunk is long,
/// and is split. If all rows have the same number of entries, at most kMax, none is split.
inline Chunks make_chunks(const CsrPattern& pattern, int64_t least) {
  constexpr int64_t kMax = 4096;
  int64_t size = least;
  while (size < kMax && size * pattern.rows < 2 * pattern.entries) size *= 2;
  if (pattern.entries <= size || has_short_rows(pattern, size)) return {size, 0};
  return {size, ceil_div(pattern.entries, size)};
}

/// The assignment of threads. The first groups, of 1 << chunk_log2 threads (a warp or more),
/// process one chunk each. All further threads process rows, in groups of 1 << group_log2 threads.
struct Units {
  Chunks chunks;
  int group_log2;
};

inline int64_t thread_count(const CsrPattern& pattern, const Units& units, int chunk_log2) {
  return (units.chunks.count << chunk_log2) + (pattern.rows << units.group_log2);
}

/// Elements of the widest vectors in which rows can be read.
inline int lanes_of(const DenseRows& rows, int64_t width, Dtype dtype) {
  return widest_lanes(rows.data, dtype, {width, rows.row_stride, rows.batch_stride});
}

}  // namespace torchkiln::sparse
