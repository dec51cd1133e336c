#pragma once

#include <cstdint>

#include "torchkiln/core/activations.h"
#include "torchkiln/core/dtype.h"

struct CUstream_st;

namespace torchkiln {

/// Matrices [batch, rows, columns] with any non-negative strides, in elements. A batch stride of 0
/// repeats one matrix.
struct Matrices {
  const void* data;
  int64_t row_stride;
  int64_t column_stride;
  int64_t batch_stride;
};

/// out = activation(a b * scale + bias) + residual, accumulated in float32 (float64 for float64).
/// The argument of the activation may have been rounded to the dtype of the result.
struct Matmul {
  Matrices a;            // [batch, m, k]
  Matrices b;            // [batch, k, n]
  const void* bias;      // [n], contiguous; null if there is none
  const void* residual;  // [batch, m, n], contiguous; null if there is none
  void* out;             // [batch, m, n], contiguous
  void* preactivation;   // a b * scale + bias, [batch, m, n], contiguous; null if not wanted
  Dtype dtype;           // dtype of all tensors except bias
  Dtype bias_dtype;      // dtype, or float32 for half precision
  Activation activation;
  double scale;
  int64_t batch;
  int64_t m;
  int64_t n;
  int64_t k;
};

/// The backward of a gate in the epilogue of the product that computes the gradient of the gate's
/// output:
///   grad = a b, [grad_gate, grad_up] = the gradients of activation(gate) * up
/// `out` of the product receives activation(gate) * up; grad is not written. The product has no
/// bias, residual or preactivation.
struct GateGradient {
  Matmul product;
  const void* gate_up;  // [m, 2 n], contiguous
  void* grad_gate_up;   // [m, 2 n], contiguous; may be gate_up
};

/// Copies rows of 16-bit elements with any alignment.
struct CopyRows {
  const void* from;     // [rows, columns]
  void* to;             // [rows, to_columns]; columns from `columns` on become 0
  int64_t from_stride;  // between rows, in elements
  int64_t to_stride;
  int64_t rows;
  int64_t columns;
  int64_t to_columns;  // at least `columns`; the others are zeroed
};

/// The kernels for a product.
enum class MatmulKernel : int32_t {
  sm90,         // wgmma and TMA, compute capability 9.0
  tensor_core,  // mma of warps in half precision, from compute capability 8.0 on
  simt,         // without tensor cores, on all devices
  library       // cuBLAS is faster, and the caller calls it
};

inline const char* name_of(MatmulKernel kernel) {
  constexpr const char* kNames[] = {"sm90", "tensor_core", "simt", "library"};
  return kNames[static_cast<int32_t>(kernel)];
}

namespace cuda {

/// The fastest kernel for this product on the current device, as measured. `has_library`: whether
/// the caller can call cuBLAS; otherwise `library` is never returned.
TORCHKILN_EXPORT MatmulKernel choose(const Matmul& arguments, bool has_library);

/// Computes the product on the current device, queued on `stream`, with a kernel that choose()
/// returned, but not `library`. k is not split over blocks, so results are bitwise reproducible.
TORCHKILN_EXPORT Status matmul(const Matmul& arguments, MatmulKernel kernel, CUstream_st* stream);

/// Whether one kernel for a product and a gate takes less time on the current device, as measured,
/// than two kernels. In the first overload the columns of b are those of gate, then of up, and out
/// is [m, n / 2]: activation(gate) * up for [gate, up] = a b + bias, rounded to the dtype.
TORCHKILN_EXPORT bool gains_from_gate(const Matmul& arguments);
TORCHKILN_EXPORT bool gains_from_gate(const GateGradient& arguments);

/// Runs the kernel for a product and a gate on the current device, queued on `stream`. Results are
/// bitwise reproducible.
TORCHKILN_EXPORT Status matmul_gate(const Matmul& arguments, CUstream_st* stream);
TORCHKILN_EXPORT Status matmul_gate(const GateGradient& arguments, CUstream_st* stream);

/// Runs on the current device, queued on `stream`.
TORCHKILN_EXPORT Status copy_rows(const CopyRows& arguments, CUstream_st* stream);

}  // namespace cuda
}  // namespace torchkiln
