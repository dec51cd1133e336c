#pragma once

// Views of tensors as rows of adjacent elements, for the kernels of norms and losses.

#include <ATen/core/Tensor.h>

#include "detail/collapse_dims.h"
#include "detail/contiguous_copy.h"
#include "detail/maybe_copy.h"
#include "torchkiln/torch/note.h"

namespace torchkiln {

/// A tensor [rows, columns] with column stride 1.
struct RowsView {
  MaybeCopy tensor;
  int64_t stride;  // elements from one row to the next
};

/// Whether the elements of the last dimension are not adjacent, so that rows need a copy.
inline bool has_columns_apart(const at::Tensor& tensor) {
  return tensor.size(-1) > 1 && tensor.stride(-1) != 1;
}

/// A tensor as rows of `columns` elements: a view if the rows are evenly spaced, else a copy.
inline RowsView view_as_rows(const at::Tensor& tensor, int64_t rows, int64_t columns) {
  if (tensor.is_contiguous()) return {MaybeCopy::borrowed(tensor), columns};
  at::Tensor view = has_columns_apart(tensor) ? contiguous_copy(tensor).view({rows, columns})
                                              : tensor.reshape({rows, columns});
  if (columns > 1 && view.stride(1) != 1) view = view.contiguous();
  if (view.const_data_ptr() != tensor.const_data_ptr())
    trace::note("copied: strides ", tensor.strides(), " are no evenly spaced rows of ", columns,
                " adjacent elements");
  const int64_t stride = view.stride(0);
  return {MaybeCopy::owned(std::move(view)), stride};
}

/// A view of a tensor as [rows, size of the last dimension]; nullopt if the strides do not allow
/// one.
inline std::optional<MaybeCopy> rows_without_copy(const at::Tensor& tensor) {
  const int64_t last = tensor.dim() - 1;
  const int64_t columns = tensor.size(last);
  if (columns != 1 && tensor.stride(last) != 1) return std::nullopt;
  if (tensor.dim() == 2) return MaybeCopy::borrowed(tensor);
  const auto rows = collapse_dims(tensor, 0, last);
  if (!rows) return std::nullopt;
  return MaybeCopy::owned(tensor.as_strided({rows->size, columns}, {rows->stride, 1}));
}

}  // namespace torchkiln
