#pragma once

// Handles of NVIDIA's libraries, from the pools that torch has of them: one for each thread and
// device, made at its first use and kept. For builds with CUDA; whoever calls the libraries links
// them, too.

#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>

namespace torchkiln {

/// The handles of a tensor's device, set to its current stream, while this object lives. They
/// belong to torch: destroy none, and set back what you change (a pointer mode, a math mode).
///
///     const Handles handles(x);
///     cublasSgemm(handles.cublas(), ...);
class Handles {
 public:
  explicit Handles(const at::Tensor& where) : guard_(where.device()) {}

  /// With a workspace of torch's allocator, and TF32 where torch allows it.
  cublasHandle_t cublas() const { return at::cuda::getCurrentCUDABlasHandle(); }

  /// Has no stream: it is given to each call. See stream().
  cublasLtHandle_t cublas_lt() const { return at::cuda::getCurrentCUDABlasLtHandle(); }

  cusparseHandle_t cusparse() const { return at::cuda::getCurrentCUDASparseHandle(); }

  cudaStream_t stream() const { return at::cuda::getCurrentCUDAStream().stream(); }

 private:
  c10::cuda::CUDAGuard guard_;
};

}  // namespace torchkiln
