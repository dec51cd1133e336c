#pragma once

// Handles of NVIDIA's libraries from torch's pools: one per thread and device, created at the first
// use and kept. For builds with CUDA. Code that calls a library must link it, too.

#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>

namespace torchkiln {

/// The handles for a tensor's device, set to its current stream, for the lifetime of this object.
/// Torch owns them: do not destroy them, and restore settings that you change (pointer mode, math
/// mode).
///
///     const Handles handles(x);
///     cublasSgemm(handles.cublas(), ...);
class Handles {
 public:
  explicit Handles(const at::Tensor& where) : guard_(where.device()) {}

  /// A handle with a workspace from torch's allocator. It uses TF32 if torch allows that.
  cublasHandle_t cublas() const { return at::cuda::getCurrentCUDABlasHandle(); }

  /// A handle without a stream: pass stream() to each call of cuBLASLt.
  cublasLtHandle_t cublas_lt() const { return at::cuda::getCurrentCUDABlasLtHandle(); }

  cusparseHandle_t cusparse() const { return at::cuda::getCurrentCUDASparseHandle(); }

  cudaStream_t stream() const { return at::cuda::getCurrentCUDAStream().stream(); }

 private:
  c10::cuda::CUDAGuard guard_;
};

}  // namespace torchkiln
