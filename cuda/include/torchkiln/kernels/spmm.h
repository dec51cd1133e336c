#pragma once

#include <algorithm>

#include "torchkiln/core/dtype.h"
#include "torchkiln/core/workspace.h"

struct CUstream_st;

namespace torchkiln {

/// A batch of sparse matrices in compressed rows. If the batch stride is 0, all matrices share the
/// pattern.
struct CsrPattern {
  const void* crow;  // [batch, rows + 1]: row r has the entries crow[r] <= e < crow[r + 1]
  const void* col;   // [batch, entries], in any order within a row
  bool wide;         // crow and col are int64; else both are int32
  int64_t rows;
  int64_t columns;
  int64_t entries;  // per matrix
  int64_t crow_batch_stride;
  int64_t col_batch_stride;
};

/// A batch of dense matrices whose columns are adjacent.
struct DenseRows {
  const void* data;
  int64_t row_stride;
  int64_t batch_stride;  // 0: all batches share one matrix
};

/// out[b] = A[b] dense[b]. For transposed patterns, `order` selects the value of each entry.
struct Spmm {
  CsrPattern pattern;
  const void* values;    // [batch, entries]
  const int32_t* order;  // [batch, entries]: index of each entry's value; null: entry e has value e
  DenseRows dense;       // [batch, columns, width]
  int64_t column_stride = 1;  // of dense; not 1 only if reads_columns()
  void* out;                  // [batch, rows, width], contiguous
  Dtype dtype;
  int64_t batch;
  int64_t width;
  int64_t values_batch_stride;
  int64_t order_batch_stride;
  void* workspace;  // set by the CUDA launcher
};

/// Whether spmm() on a GPU should read `dense`, whose columns are contiguous, in place. Then each
/// element that an entry needs costs a sector of 32 bytes, which is little if there are few
/// entries. The alternative, a copy in rows, reads and writes all elements, at about an eighth of
/// the speed.
inline bool reads_columns(const Spmm& p) {
  const int64_t matrices = p.dense.batch_stride == 0 ? 1 : p.batch;
  return p.column_stride != 1 && p.dense.row_stride == 1 &&
         2 * p.pattern.entries * p.batch <=
             matrices * p.pattern.columns * static_cast<int64_t>(size_of(p.dtype));
}

/// out = the transpose of one sparse matrix with few columns, times x: a pass over the rows of
/// both, for which the transposed pattern need not be built. There is at least one row.
struct SpmmColumns {
  CsrPattern pattern;
  const void* values;  // [entries]
  DenseRows x;         // [rows, width]
  void* out;           // [columns, width], contiguous
  Dtype dtype;
  int64_t width;
  void* workspace;  // of the CPU: the sums of each chunk of rows
};

/// Whether cpu::spmm_columns() should compute the product with a transposed matrix. Each thread
/// adds to a result of its own, which must fit in the L2 cache and is added to the others at the
/// end, so that a column needs several entries.
inline bool has_small_product(int64_t columns, int64_t width, int64_t entries) {
  constexpr int64_t kMostElements = 1 << 16, kFewestEntries = 8;  // of the result, of a column
  return columns > 0 && columns <= kMostElements / std::max<int64_t>(width, 1) &&
         entries >= kFewestEntries * columns;
}

/// Whether cuda::spmm_columns() should compute the product with a transposed matrix. Every row has
/// a weight for each column in registers and shared memory, so columns must be few, and at least a
/// sixteenth of the elements stored.
inline bool has_few_columns(int64_t rows, int64_t columns, int64_t entries) {
  constexpr int64_t kMostColumns = 32, kMostElements = 16;  // per entry
  return entries > 0 && columns <= kMostColumns && entries <= rows * columns &&
         rows * columns <= kMostElements * entries;
}

/// out[b, e] = the dot product of row i of left[b] and row j of right[b], for entry e at (i, j). If
/// `summed`, the results are added over the batch.
struct SampledProduct {
  CsrPattern pattern;
  DenseRows left;             // [batch, rows, width]
  DenseRows right;            // [batch, columns, width]
  int64_t column_stride = 1;  // of right; not 1 only if reads_columns()
  void* out;                  // [batch, entries] or, if summed, [entries]; contiguous
  Dtype dtype;
  int64_t batch;
  int64_t width;
  bool summed;  // only for a pattern that all batches share
};

/// Whether cuda::sampled_product() should read `right` in place, for the reason of
/// reads_columns(Spmm).
inline bool reads_columns(const SampledProduct& p) {
  return p.column_stride != 1 && p.right.row_stride == 1 && p.batch == 1 &&
         2 * p.pattern.entries <= p.pattern.columns * static_cast<int64_t>(size_of(p.dtype));
}

/// Builds the pattern of the transposed matrix. Its entries are ordered by column and, within a
/// column, by their order in the original. The result is packed: per matrix the begin of each row
/// (columns + 1), the column of each entry (entries) and the index of each entry's value (entries).
struct CsrTranspose {
  CsrPattern pattern;
  int64_t batch;  // number of patterns
  int32_t* out;   // [batch, columns + 1 + 2 * entries]
};

/// The number of elements of a packed transposed pattern.
inline int64_t packed_size(int64_t columns, int64_t entries) { return columns + 1 + 2 * entries; }

/// Faults of a pattern, one bit each. `unsorted`: the columns of a row do not ascend. This is
/// allowed, except in a transposed pattern, where it means duplicate entries.
enum class CsrFault : int32_t { begin = 1, end = 2, order = 4, column = 8, unsorted = 16 };

/// Sets, in *faults, the bits of all faults that any pattern has.
struct CsrCheck {
  CsrPattern pattern;
  int64_t batch;  // number of patterns
  int32_t* faults;
};

namespace cpu {

/// Computes the rows begin <= row < end of batch * rows.
TORCHKILN_EXPORT Status spmm(const Spmm& arguments, int64_t begin, int64_t end);

/// Computes the rows begin <= row < end of batch * rows, or of rows if summed.
TORCHKILN_EXPORT Status sampled_product(const SampledProduct& arguments, int64_t begin,
                                        int64_t end);

/// Adds the rows of the chunks begin <= chunk < end to the sums of these chunks.
TORCHKILN_EXPORT Status spmm_columns(const SpmmColumns& arguments, int64_t begin, int64_t end);
/// Adds the sums of all chunks, for the columns begin <= column < end.
TORCHKILN_EXPORT Status spmm_columns_finish(const SpmmColumns& arguments, int64_t begin,
                                            int64_t end);
TORCHKILN_EXPORT Split split(const SpmmColumns& arguments);

/// Processes the matrices begin <= matrix < end.
TORCHKILN_EXPORT Status csr_transpose(const CsrTranspose& arguments, int64_t begin, int64_t end);
TORCHKILN_EXPORT Status csr_check(const CsrCheck& arguments, int64_t begin, int64_t end);

}  // namespace cpu

namespace cuda {

/// Runs on the current device, queued on `stream`.
TORCHKILN_EXPORT Status spmm(const Spmm& arguments, Allocate allocate, CUstream_st* stream);
TORCHKILN_EXPORT Status spmm_columns(const SpmmColumns& arguments, Allocate allocate,
                                     CUstream_st* stream);
TORCHKILN_EXPORT Status sampled_product(const SampledProduct& arguments, CUstream_st* stream);
TORCHKILN_EXPORT Status csr_transpose(const CsrTranspose& arguments, Allocate allocate,
                                      CUstream_st* stream);
TORCHKILN_EXPORT Status csr_check(const CsrCheck& arguments, CUstream_st* stream);

}  // namespace cuda
}  // namespace torchkiln
