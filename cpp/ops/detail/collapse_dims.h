#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace torchkiln {

/// Neighbouring dimensions as one.
struct CollapsedDims {
  int64_t size = 1;
  int64_t stride = 0;
};

/// The dimensions begin <= d < end; nothing where no single stride leads through them.
inline std::optional<CollapsedDims> collapse_dims(const at::Tensor& tensor, int64_t begin,
                                                  int64_t end) {
  CollapsedDims found;
  for (int64_t d = begin; d < end; ++d) {
    const int64_t size = tensor.size(d);
    const int64_t stride = tensor.stride(d);
    if (size == 1) continue;
    if (found.size != 1 && found.stride != size * stride) return std::nullopt;
    found = {found.size * size, stride};
  }
  return found;
}

}  // namespace torchkiln
