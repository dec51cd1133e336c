#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/MaybeOwned.h>

#include <optional>

namespace torchkiln {

/// A borrowed tensor, or an owned copy. Borrowing avoids a second reference to a tensor that Python
/// owns, which would take the GIL (0.1 us).
using MaybeCopy = c10::MaybeOwned<at::Tensor>;

/// A tensor, or a contiguous copy of it.
inline MaybeCopy as_contiguous(const at::Tensor& tensor) {
  return tensor.is_contiguous() ? MaybeCopy::borrowed(tensor)
                                : MaybeCopy::owned(tensor.contiguous());
}

/// An optional tensor, made contiguous; undefined if there is none.
inline at::Tensor contiguous(const std::optional<at::Tensor>& tensor) {
  return tensor ? tensor->contiguous() : at::Tensor();
}

/// The address of a tensor that kernels read; null if it is undefined.
inline const void* data(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}

}  // namespace torchkiln
