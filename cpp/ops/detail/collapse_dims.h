#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace torchkiln {

/// Several adjacent dimensions, merged into one.
struct CollapsedDims {
  int64_t size = 1;
  int64_t stride = 0;
};

/// Merges the dimensions begin <= d < end; nullopt if no single stride covers them.
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
