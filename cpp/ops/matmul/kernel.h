#pragma once

// Fills the arguments of the matrix product kernels, and launches one of them if it is the fastest.

#include <ATen/ATen.h>

#include "torchkiln/kernels/matmul.h"
#include "torchkiln/torch/elementwise.h"
#include "torchkiln/torch/launch.h"
#include "torchkiln/torch/note.h"

namespace torchkiln {

/// A tensor as a matrix of its rows. Uses reshape(), because torch's gradcheck cannot vmap
/// flatten().
inline at::Tensor as_matrix(const at::Tensor& tensor) {
  if (tensor.dim() == 2) return tensor;
  if (tensor.dim() == 1) return tensor.unsqueeze(0);
  const c10::SymIntArrayRef leading = tensor.sym_sizes().slice(0, tensor.dim() - 1);
  return tensor.reshape_symint({c10::multiply_integers(leading), tensor.sym_size(-1)});
}

/// Describes out = a b^T for a [m, k], b [n, k] and a contiguous out [..., n].
inline Matmul describe_linear(const at::Tensor& a, const at::Tensor& b, const at::Tensor& out) {
  Matmul arguments{};
  arguments.a = {a.const_data_ptr(), a.stride(0), a.stride(1), /*batch_stride=*/0};
  arguments.b = {b.const_data_ptr(), b.stride(1), b.stride(0), /*batch_stride=*/0};
  arguments.out = out.data_ptr();
  arguments.dtype = dtype_of(out);
  arguments.bias_dtype = arguments.dtype;
  arguments.activation = kActivation<None>;
  arguments.scale = 1;
  arguments.batch = 1;
  arguments.m = a.size(0);
  arguments.n = b.size(0);
  arguments.k = a.size(1);
  return arguments;
}

/// Launches the kernel that choose() selects. Returns false if it selects torch's product.
inline bool run_own_kernel(const char* op, const Matmul& arguments, const at::Tensor& out) {
  if (!out.is_cuda()) return false;
  bool done = false;
  launch(
      op, out, 0, 1,
      [&](auto stream) -> Status {
        const MatmulKernel kernel = cuda::choose(arguments, /*beside_library=*/true);
        done = kernel != MatmulKernel::library;
        trace::note("product by ", name_of(kernel));
        return done ? cuda::matmul(arguments, kernel, stream) : Status{};
      },
      [](int64_t, int64_t) { return Status{}; });
  return done;
}

}  // namespace torchkiln
