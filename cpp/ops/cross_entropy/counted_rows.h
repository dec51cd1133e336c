#pragma once

// The argument `rows`: indices or a mask of the rows to compute.

#include <ATen/ATen.h>

#include "torchkiln/torch/checks.h"

namespace torchkiln {

/// The indices of the rows, for results of this shape. If `rows` is a mask, the number of rows is
/// read from the device.
inline at::Tensor counted_rows(const char* op, const at::Tensor& x, const at::Tensor& rows,
                               c10::SymIntArrayRef shape) {
  const bool is_mask = rows.scalar_type() == at::kBool;
  check_tensors(op, {{"x", x}, {"rows", rows}});
  TORCH_CHECK(
      is_mask ? rows.sym_sizes().equals(shape) : rows.scalar_type() == at::kLong && rows.dim() == 1,
      "torchkiln.", op, ": rows: got ", dtype_name(rows.scalar_type()), " ", rows.sym_sizes(),
      ", expected int64 [any], indices of rows, or bool ", shape,
      ", a mask of the shape of the result");
  return is_mask ? rows.reshape({-1}).nonzero().squeeze(-1) : rows;
}

/// A tensor of this shape with the numbers `found` in `rows`, and zeros in all other rows.
inline at::Tensor among_zeros(const at::Tensor& found, const at::Tensor& rows,
                              c10::SymIntArrayRef shape) {
  const at::Tensor all = at::zeros_symint({c10::multiply_integers(shape)}, found.options());
  return all.index_copy(0, rows, found).view_symint(shape);
}

}  // namespace torchkiln
