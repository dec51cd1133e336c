#pragma once

// Copies that change the order of the elements in memory.

#include <ATen/ATen.h>

#include "torchkiln/kernels/activation.h"
#include "torchkiln/torch/elementwise.h"

namespace torchkiln {

/// Whether a copy to a dense tensor transposes planes that are large enough for the squares of our
/// elementwise kernels.
inline bool transposes(const Layout<1>& layout) {
  constexpr int64_t kSide = 16;  // least size of both dimensions
  return (layout.rank == 2 || layout.rank == 3) && layout.size[0] >= kSide &&
         layout.size[1] >= kSide && layout.stride[0][0] > 1 && layout.stride[0][1] == 1;
}

/// Copies a tensor to a dense tensor of its shape and dtype, which exists already. On a GPU, our
/// elementwise kernels transpose through squares in shared memory, whereas torch's copy accesses
/// single elements that are far apart.
inline void copy_elements(const at::Tensor& to, const at::Tensor& from) {
  if (from.is_cuda() && from.is_floating_point() && from.numel() > 0) {
    std::array inputs{from};
    const auto arguments = describe(std::array{to}, inputs);
    if (transposes(arguments.layout)) {
      const auto none = [](int64_t, int64_t) { return Status{}; };
      return launch(
          "copy", to, 0, 1,
          [&](auto stream) { return cuda::activation(arguments, kActivation<None>, stream); },
          none);
    }
  }
  to.copy_(from);
}

/// A contiguous copy of a tensor that is not contiguous.
inline at::Tensor contiguous_copy(const at::Tensor& tensor) {
  at::Tensor copy = at::empty(tensor.sizes(), tensor.options());
  copy_elements(copy, tensor);
  return copy;
}

}  // namespace torchkiln
