#pragma once

#include "torchkiln/core/dtype.h"
#include "torchkiln/core/workspace.h"

struct CUstream_st;

namespace torchkiln {

/// A batch of sparse matrices in compressed rows. A stride of 0 is a pattern that all share.
struct CsrPattern {
  const void* crow;  // [batch, rows + 1]: where each row begins and ends among the entries
  const void* col;   // [batch, entries], in any order within a row
  bool wide;         // whether both are int64; else they are int32
  int64_t rows;
  int64_t columns;
  int64_t entries;  // of one matrix
  int64_t crow_batch_stride;
  int64_t col_batch_stride;
};

/// A batch of dense matrices whose columns are adjacent.
struct DenseRows {
  const void* data;
  int64_t row_stride;
  int64_t batch_stride;  // 0 is a matrix that all share
};

/// out[b] = A[b] dense[b], or with the values taken in the order that a transposed pattern gives.
struct Spmm {
  CsrPattern pattern;
  const void* values;    // [batch, entries]
  const int32_t* order;  // [batch, entries]: which value each entry has; null: its own
  DenseRows dense;       // [batch, columns, width]
  void* out;             // [batch, rows, width], contiguous
  Dtype dtype;
  int64_t batch;
  int64_t width;
  int64_t values_batch_stride;
  int64_t order_batch_stride;
  void* workspace;  // set by the CUDA launcher
};

/// out[b, e] = the product of row i of left[b] and row j of right[b], where entry e lies at (i, j);
/// summed over the batch where `summed`.
struct SampledProduct {
  CsrPattern pattern;
  DenseRows left;   // [batch, rows, width]
  DenseRows right;  // [batch, columns, width]
  void* out;        // [batch, entries] or, summed, [entries]; contiguous
  Dtype dtype;
  int64_t batch;
  int64_t width;
  bool summed;  // only of a pattern that all share
};

/// The pattern of the transposed matrix, its entries in the order of the rows they come from and,
/// within one, of the entries. It is packed: for each matrix where its rows begin (columns + 1),
/// the columns (entries) and the order of the values (entries).
struct CsrTranspose {
  CsrPattern pattern;
  int64_t batch;  // of patterns
  int32_t* out;   // [batch, columns + 1 + 2 * entries]
};

/// The parts of a packed transposed pattern.
inline int64_t packed_size(int64_t columns, int64_t entries) { return columns + 1 + 2 * entries; }

/// What a check of patterns found, a bit each. Columns that do not ascend within a row are no
/// fault, but in the transposed pattern they are entries that lie at one place.
enum class CsrFault : int32_t { begin = 1, end = 2, order = 4, column = 8, unsorted = 16 };

/// Ors the faults of the patterns into *faults.
struct CsrCheck {
  CsrPattern pattern;
  int64_t batch;  // of patterns
  int32_t* faults;
};

namespace cpu {

/// The rows begin <= row < end of batch * rows.
TORCHKILN_EXPORT Status spmm(const Spmm& arguments, int64_t begin, int64_t end);

/// The rows begin <= row < end of batch * rows, or of rows where they are summed.
TORCHKILN_EXPORT Status sampled_product(const SampledProduct& arguments, int64_t begin,
                                        int64_t end);

/// The matrices begin <= matrix < end.
TORCHKILN_EXPORT Status csr_transpose(const CsrTranspose& arguments, int64_t begin, int64_t end);
TORCHKILN_EXPORT Status csr_check(const CsrCheck& arguments, int64_t begin, int64_t end);

}  // namespace cpu

namespace cuda {

/// On the current device, queued on `stream`.
TORCHKILN_EXPORT Status spmm(const Spmm& arguments, Allocate allocate, CUstream_st* stream);
TORCHKILN_EXPORT Status sampled_product(const SampledProduct& arguments, CUstream_st* stream);
TORCHKILN_EXPORT Status csr_transpose(const CsrTranspose& arguments, Allocate allocate,
                                      CUstream_st* stream);
TORCHKILN_EXPORT Status csr_check(const CsrCheck& arguments, CUstream_st* stream);

}  // namespace cuda
}  // namespace torchkiln
