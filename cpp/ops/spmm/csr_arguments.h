#pragma once

// Tensors in the form that the kernels of the sparse products read.

#include "detail/contiguous_copy.h"
#include "detail/maybe_copy.h"
#include "torchkiln/kernels/spmm.h"

namespace torchkiln::spmm_ops {

using at::Tensor;

/// A tensor with stride 1 in its last dimension: the tensor itself, or a copy.
inline MaybeCopy adjacent(const Tensor& tensor) {
  return tensor.size(-1) <= 1 || tensor.stride(-1) == 1 ? MaybeCopy::borrowed(tensor)
                                                        : MaybeCopy::owned(tensor.contiguous());
}

/// adjacent() for matrices of numbers, which contiguous_copy() can copy.
inline MaybeCopy adjacent_columns(const Tensor& matrices) {
  return matrices.size(-1) <= 1 || matrices.stride(-1) == 1
             ? MaybeCopy::borrowed(matrices)
             : MaybeCopy::owned(contiguous_copy(matrices));
}

inline int64_t batch_stride(const Tensor& tensor, int64_t rank) {
  return tensor.dim() == rank ? 0 : tensor.stride(0);
}

/// A pattern in the form that kernels read. Borrows the given tensors, or owns copies.
struct CsrArguments {
  MaybeCopy crow;
  MaybeCopy col;
  CsrPattern arguments{};

  CsrArguments(const Tensor& rows, const Tensor& columns_of_entries, int64_t columns)
      : crow(adjacent(rows)), col(adjacent(columns_of_entries)) {
    arguments.crow = crow->const_data_ptr();
    arguments.col = col->const_data_ptr();
    arguments.wide = crow->scalar_type() == at::kLong;
    arguments.rows = crow->size(-1) - 1;
    arguments.columns = columns;
    arguments.entries = col->size(-1);
    arguments.crow_batch_stride = batch_stride(*crow, 1);
    arguments.col_batch_stride = batch_stride(*col, 1);
  }

  int64_t matrices() const { return crow->dim() == 1 ? 1 : crow->size(0); }
};

inline DenseRows dense_rows(const Tensor& tensor) {
  return {tensor.const_data_ptr(), tensor.stride(-2), batch_stride(tensor, 2)};
}

}  // namespace torchkiln::spmm_ops
