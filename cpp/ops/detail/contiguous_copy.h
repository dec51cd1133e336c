#pragma once

// Copies that change the order of the elements in memory.

#include <ATen/ATen.h>

#include "torchkiln/kernels/activation.h"
#include "torchkiln/kernels/pointwise.h"
#include "torchkiln/torch/elementwise.h"

namespace torchkiln {

/// Whether a copy to a dense tensor transposes planes of at least `rows` x `columns` elements.
inline bool transposes(const Layout<1>& layout, int64_t rows, int64_t columns) {
  return (layout.rank == 2 || layout.rank == 3) && layout.size[1] >= rows &&
         layout.size[0] >= columns && layout.stride[0][0] > 1 && layout.stride[0][1] == 1;
}

/// The copy of a tensor to a contiguous tensor, if it transposes planes.
inline std::optional<Transpose> transpose_of(const Elementwise<1>& copy) {
  const Layout<1>& layout = copy.layout;
  const int64_t rows = layout.size[1], columns = layout.size[0];
  const bool has_matrices = layout.rank == 3;
  if (!transposes(layout, 2, 16) || layout.out_stride[0][0] != 1 ||
      layout.out_stride[0][1] != columns ||
      (has_matrices && layout.out_stride[0][2] != rows * columns))
    return std::nullopt;
  Transpose found{};
  found.from = copy.in[0];
  found.to = copy.out[0];
  found.dtype = copy.dtype;
  found.matrices = has_matrices ? layout.size[2] : 1;
  found.rows = rows;
  found.columns = columns;
  found.matrix_stride = has_matrices ? layout.stride[0][2] : 0;
  found.column_stride = layout.stride[0][0];
  return found;
}

/// Copies a tensor to a dense tensor of its shape and dtype, which exists already. Transposing, our
/// kernels exchange squares in shared memory or in registers, whereas torch's copy accesses single
/// elements that are far apart.
inline void copy_elements(const at::Tensor& to, const at::Tensor& from) {
  constexpr int64_t kSide = 16;           // least sides of a plane on a GPU
  constexpr int64_t kTileGrain = 1 << 3;  // least tiles per CPU thread
  const bool has_kernel = from.is_cuda() || from.is_cpu();
  if (has_kernel && from.is_floating_point() && from.numel() > 0) {
    std::array inputs{from};
    const auto arguments = describe(std::array{to}, inputs);
    const auto plane = from.is_cpu() ? transpose_of(arguments) : std::nullopt;
    if (plane || (from.is_cuda() && transposes(arguments.layout, kSide, kSide))) {
      return launch(
          "copy", to, plane ? plane->tiles() : 0, kTileGrain,
          [&](auto stream) { return cuda::activation(arguments, kActivation<None>, stream); },
          [&](int64_t begin, int64_t end) { return cpu::transpose(*plane, begin, end); });
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
