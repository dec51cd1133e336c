#pragma once

// Outputs that the caller gives, as for torch's out= and in-place ops without a gradient.

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>

#include "torchkiln/torch/checks.h"

namespace torchkiln {

/// Refuses an output that is not contiguous memory of this shape and dtype.
inline void check_written(const char* op, const char* name, const at::Tensor& out,
                          c10::SymIntArrayRef shape, const at::Tensor& like, at::ScalarType dtype) {
  check_tensors(op, {{"the input", like}, {name, out}});
  TORCH_CHECK(out.scalar_type() == dtype && out.sym_sizes().equals(shape), "torchkiln.", op, ": ",
              name, ": got ", dtype_name(out.scalar_type()), " ", out.sym_sizes(), ", expected ",
              dtype_name(dtype), " ", shape);
  TORCH_CHECK(out.is_contiguous(), "torchkiln.", op, ": ", name, ": got strides ",
              out.sym_strides(), ", expected a contiguous tensor");
}

/// Refuses an output whose memory is a part of an input's; it may be the input itself.
inline void check_overlap(const at::Tensor& out, const at::Tensor& input) {
  at::assert_no_partial_overlap(out, input);
}

/// Increments the version of a tensor, by which autograd finds saved tensors that were overwritten.
inline void mark_written(const at::Tensor& out) {
  if (!out.is_inference()) out.unsafeGetTensorImpl()->bump_version();
}

}  // namespace torchkiln
