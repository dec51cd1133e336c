#pragma once

#include <cstdint>

#include "torchkiln/core/activations.h"
#include "torchkiln/core/dtype.h"

struct CUstream_st;

namespace torchkiln {

/// Matrices [batch, rows, columns] at any non-negative strides, which count elements. A batch
/// stride of 0 repeats one matrix.
struct Matrices {
  const void* data;
  int64_t row_stride;
  int64_t column_stride;
  int64_t batch_stride;
};

/// out = activation(a b * scale + bias) + residual, accumulated in float32 (float64 for float64).
/// What the activation gets may have been rounded to the dtype of the result.
struct Matmul {
  Matrices a;            // [batch, m, k]
  Matrices b;            // [batch, k, n]
  const void* bias;      // [n], contiguous; null when there is none
  const void* residual;  // [batch, m, n], contiguous; null when there is none
  void* out;             // [batch, m, n], contiguous
  void* preactivation;   // a b * scale + bias, likewise; null when not wanted
  Dtype dtype;           // of all but bias
  Dtype bias_dtype;      // dtype, or float32 beside a half precision
  Activation activation;
  double scale;
  int64_t batch;
  int64_t m;
  int64_t n;
  int64_t k;
};

/// Who multiplies.
enum class MatmulKernel : int32_t {
  sm90,         // warpgroup products and bulk copies, compute capability 9.0
  tensor_core,  // warp products of half precision, from compute capability 8.0 on
  simt,         // ordinary arithmetic, everywhere
  library       // cuBLAS is faster: not of this library, the caller calls it
};

inline const char* name_of(MatmulKernel kernel) {
  constexpr const char* kNames[] = {"sm90", "tensor_core", "simt", "library"};
  return kNames[static_cast<int32_t>(kernel)];
}

namespace cuda {

/// Which of the kernels is the fastest for this product on the current device, by what was
/// measured. `beside_library`: whether the caller can call cuBLAS; else it is never the answer.
TORCHKILN_EXPORT MatmulKernel choose(const Matmul& arguments, bool beside_library);

/// On the current device, queued on `stream`, by a kernel that choose() named. No split sums: the
/// result is the same, bit for bit, from run to run.
TORCHKILN_EXPORT Status matmul(const Matmul& arguments, MatmulKernel kernel, CUstream_st* stream);

}  // namespace cuda
}  // namespace torchkiln
