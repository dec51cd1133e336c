#pragma once

// Tensors to which an op writes: outputs that the caller passes, as in torch's out= and in-place
// ops without a gradient, and state such as running statistics.

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>

#include <cstdint>

#include "torchkiln/core/status.h"
#include "torchkiln/torch/checks.h"

namespace torchkiln {

/// Rejects an output that is not contiguous or does not have this shape and dtype.
inline void check_written(const char* op, const char* name, const at::Tensor& out,
                          c10::SymIntArrayRef shape, const at::Tensor& like, at::ScalarType dtype) {
  check_tensors(op, {{"the input", like}, {name, out}});
  TORCH_CHECK(out.scalar_type() == dtype && out.sym_sizes().equals(shape), "torchkiln.", op, ": ",
              name, ": got ", dtype_name(out.scalar_type()), " ", out.sym_sizes(), ", expected ",
              dtype_name(dtype), " ", shape);
  TORCH_CHECK(out.is_contiguous(), "torchkiln.", op, ": ", name, ": got strides ",
              out.sym_strides(), ", expected a contiguous tensor");
}

/// Rejects an output that overlaps an input only in part. It may be the input itself.
inline void check_overlap(const at::Tensor& out, const at::Tensor& input) {
  at::assert_no_partial_overlap(out, input);
}

/// Increments the version of a tensor. Autograd compares versions to find saved tensors that were
/// overwritten.
inline void mark_written(const at::Tensor& out) {
  if (!out.is_inference()) out.unsafeGetTensorImpl()->bump_version();
}

/// The number of changes to the memory of a tensor that did not increment its version, modulo 2^32.
/// Tensors may share a counter, so the number may also grow by changes of another tensor.
TORCHKILN_EXPORT uint32_t silent_changes(const at::Tensor& tensor);

/// Counts a change that does not increment the version. Batch norm updates running statistics in
/// this way, as torch does: backward saves them but does not use their values, and a second call
/// must not invalidate the first.
TORCHKILN_EXPORT void count_silent_change(const at::Tensor& tensor);

}  // namespace torchkiln
