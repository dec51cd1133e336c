#pragma once

// Views of tensors in the form that the softmax kernels read: [outer, length, inner] with one
// stride each, and the mask of each row.

#include <ATen/ATen.h>

#include <optional>

#include "detail/collapse_dims.h"
#include "detail/maybe_copy.h"
#include "torchkiln/kernels/softmax.h"
#include "torchkiln/torch/elementwise.h"
#include "torchkiln/torch/note.h"

namespace torchkiln {

/// A tensor as [outer, length, inner] around one of its dimensions.
struct SoftmaxView {
  MaybeCopy tensor;
  int64_t outer;
  int64_t length;
  int64_t inner;
  int64_t outer_stride;
  int64_t stride;
  int64_t inner_stride;
};

/// Views a tensor around dimension `dim`; copies it if the outer or inner dimensions do not merge.
inline SoftmaxView view_around(const at::Tensor& tensor, int64_t dim) {
  if (tensor.dim() == 0) return {MaybeCopy::borrowed(tensor), 1, 1, 1, 0, 0, 0};
  const auto outer = collapse_dims(tensor, 0, dim);
  const auto inner = collapse_dims(tensor, dim + 1, tensor.dim());
  if (!outer || !inner) {
    trace::note("copied: no single stride leads through the dimensions before or after ", dim,
                " of strides ", tensor.strides());
    at::Tensor copy = tensor.contiguous();
    SoftmaxView view = view_around(copy, dim);
    view.tensor = MaybeCopy::owned(std::move(copy));
    return view;
  }
  return {MaybeCopy::borrowed(tensor), outer->size,  tensor.size(dim), inner->size, outer->stride,
          tensor.stride(dim),          inner->stride};
}

/// view_around() for kernels that write rows of adjacent elements. On CUDA, rows whose elements are
/// not adjacent are copied first if they are long or if `copies`, because this takes less time.
inline SoftmaxView view_of_rows(const at::Tensor& tensor, int64_t dim, bool copies) {
  SoftmaxView view = view_around(tensor, dim);
  const int64_t bytes = view.length * static_cast<int64_t>(tensor.itemsize());
  if (!tensor.is_cuda() || view.inner != 1 || view.stride == 1 || view.length == 1) return view;
  if (!copies && bytes <= most_strided_bytes(view.outer)) return view;
  trace::note("copied: the elements of a row of ", bytes, " bytes lie ", view.stride, " apart");
  at::Tensor copy = tensor.contiguous();
  view = view_around(copy, dim);
  view.tensor = MaybeCopy::owned(std::move(copy));
  return view;
}

/// Whether dimension `dim` has dimensions of size > 1 after it.
inline bool has_inner(const at::Tensor& tensor, int64_t dim) {
  for (int64_t d = dim + 1; d < tensor.dim(); ++d) {
    if (tensor.size(d) != 1) return true;
  }
  return false;
}

/// Describes the mask of x's rows along `dim`, the last dimension of size > 1. A mask whose strides
/// do not fit is replaced by a copy, which `mask` then owns.
inline RowMask describe_mask(const at::Tensor& x, int64_t dim, std::optional<at::Tensor>& mask,
                             bool causal) {
  RowMask rows{};
  rows.causal = causal;
  rows.queries = causal ? x.size(-2) : 1;
  if (!mask.has_value()) return rows;
  at::Tensor expanded = mask->expand(x.sizes());
  const int64_t stride = x.dim() == 0 || x.size(dim) == 1 ? 0 : expanded.stride(dim);
  if (stride != 0 && stride != 1) {
    trace::note("mask copied: the masked elements of a row lie ", stride, " apart");
    mask = mask->contiguous();
    return describe_mask(x, dim, mask, causal);
  }
  c10::SmallVector<Dimension<1>, 8> dims;
  int64_t row_stride = 1;
  for (int64_t d = dim - 1; d >= 0; --d) {
    dims.push_back({x.size(d), {row_stride}, {x.size(d) == 1 ? 0 : expanded.stride(d)}});
    row_stride *= x.size(d);
  }
  if (!make_layout(dims.data(), static_cast<int>(dims.size()), rows.rows)) {
    mask = expanded.contiguous();
    return describe_mask(x, dim, mask, causal);
  }
  rows.data = mask->const_data_ptr<bool>();
  rows.stride = stride;
  return rows;
}

}  // namespace torchkiln
