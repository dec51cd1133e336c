#pragma once

// Uninitialised outputs, which may be Meta tensors or have symbolic sizes.

#include <ATen/ATen.h>

namespace torchkiln {

/// A contiguous tensor on the device of `like`.
inline at::Tensor empty_of(c10::SymIntArrayRef sizes, const at::TensorOptions& like) {
  return at::empty_symint(sizes, like.memory_format(at::MemoryFormat::Contiguous));
}
inline at::Tensor empty_of(c10::SymIntArrayRef sizes, const at::Tensor& like) {
  return empty_of(sizes, like.options());
}

/// A contiguous tensor of x's shape.
inline at::Tensor empty_contiguous(const at::Tensor& x) { return empty_of(x.sym_sizes(), x); }

/// A tensor of x's shape: with the strides of `x` if x is dense, as in torch's elementwise ops,
/// else contiguous.
inline at::Tensor empty_in_layout_of(const at::Tensor& x) {
  return x.is_non_overlapping_and_dense() ? at::empty_like(x)
                                          : at::empty_symint(x.sym_sizes(), x.options());
}

/// An empty tensor instead of an output that is not needed: schemas cannot return "none".
inline at::Tensor no_output(const at::Tensor& like) { return at::empty({0}, like.options()); }

}  // namespace torchkiln
