#pragma once

#include <ATen/ATen.h>

#include <algorithm>

#include "detail/composite_activations.h"

namespace torchkiln {

/// A contiguous copy of a floating-point tensor that is not contiguous. If another dimension than
/// the last one is adjacent in memory, our elementwise kernels transpose the tensor on a GPU,
/// through tiles in shared memory; torch's copy reads or writes single elements far apart.
inline at::Tensor contiguous_copy(const at::Tensor& tensor) {
  constexpr int64_t kFewest = 16;  // elements of a row; shorter ones fill no tile
  const auto strides = tensor.strides();
  const bool is_transposed = tensor.is_cuda() && tensor.size(-1) >= kFewest &&
                             strides.back() != 1 &&
                             std::find(strides.begin(), strides.end(), 1) != strides.end();
  if (!is_transposed) return tensor.contiguous();
  at::Tensor copy = at::empty(tensor.sizes(), tensor.options());
  run_activation("contiguous_copy", kActivation<None>, copy, tensor);
  return copy;
}

}  // namespace torchkiln
