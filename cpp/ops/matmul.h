#pragma once

// From tensors to a product: by a kernel of ours where that is the faster one, else by torch's.

#include <ATen/ATen.h>

#include "elementwise.h"
#include "torchkiln/kernels/matmul.h"
#include "torchkiln/launch.h"

namespace torchkiln {

/// [batch, rows, columns]; a batch of one serves every other batch.
inline Matrices describe_matrices(const at::Tensor& matrices) {
  return {matrices.const_data_ptr(), matrices.stride(1), matrices.stride(2),
          matrices.size(0) == 1 ? 0 : matrices.stride(0)};
}

/// a [batch or 1, m, k], b [batch or 1, k, n], out [batch, m, n] and contiguous.
inline Matmul describe_product(const at::Tensor& a, const at::Tensor& b, const at::Tensor& out) {
  Matmul arguments{};
  arguments.a = describe_matrices(a);
  arguments.b = describe_matrices(b);
  arguments.out = out.data_ptr();
  arguments.dtype = dtype_of(out);
  arguments.bias_dtype = arguments.dtype;
  arguments.activation = kActivation<None>;
  arguments.scale = 1;
  arguments.batch = out.size(0);
  arguments.m = out.size(1);
  arguments.n = out.size(2);
  arguments.k = a.size(2);
  return arguments;
}

/// Queues the kernel that choose() names; false where that is torch's own.
inline bool run_own_kernel(const char* op, const Matmul& arguments, const at::Tensor& out) {
  if (!out.is_cuda()) return false;
  bool done = false;
  launch(
      op, out, 0, 1,
      [&](auto stream) -> Status {
        const MatmulKernel kernel = cuda::choose(arguments, /*beside_library=*/true);
        done = kernel != MatmulKernel::library;
        return done ? cuda::matmul(arguments, kernel, stream) : Status{};
      },
      [](int64_t, int64_t) { return Status{}; });
  return done;
}

}  // namespace torchkiln
