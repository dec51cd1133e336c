#pragma once

#include <cstddef>
#include <cstdint>

#include "torchkiln/core/dtype.h"
#include "torchkiln/core/workspace.h"

struct CUstream_st;

namespace torchkiln {

/// Layer norm and RMS norm of each row of z = x + residual, or of x if there is no residual:
///   y = (z - mean) * rstd * (weight + weight_offset) + bias
/// with rstd = 1 / sqrt(mean of (z - mean)^2 + eps), and mean = 0 for RMS norm. The product
/// (z - mean) * rstd is rounded to `dtype` if `rounds_normalized`.
struct Norm {
  const void* x;         // [rows, columns], columns adjacent
  const void* residual;  // as x; null if there is none
  const void* weight;    // [columns], contiguous; null for ones, ignoring weight_offset
  const void* bias;      // [columns], contiguous; null for zeros
  void* y;               // [rows, columns], contiguous; unused if `data` is not null
  void* sum;             // [rows, columns], contiguous: x + residual, rounded before it is
                         // normalized; null without a residual
  void* mean;            // [rows] of the compute type; null for RMS norm or if not wanted
  void* rstd;            // [rows] of the compute type; null if not wanted
  uint8_t* data;         // [rows, columns]: y, rounded to `dtype`, as `data` of Quantize; null: not
                         // wanted
  float* scale;          // [blocks of 128 columns, rows], as `scale` of Quantize
  Dtype dtype;           // dtype of x, y and sum; with `data` not float64
  Dtype residual_dtype;  // dtype, or half precision if dtype is float32
  Dtype weight_dtype;    // dtype of weight and bias: dtype, or float32 for half precision
  bool centered;         // layer norm; else RMS norm
  bool rounds_normalized;
  double eps;
  double weight_offset;
  int64_t rows;
  int64_t columns;
  int64_t x_row_stride;
  int64_t residual_row_stride;
};

/// Gradients of Norm: with n = (z - mean) * rstd and d = grad * (weight + weight_offset)
///   grad_x      = (d - mean of d - n * mean of (d * n)) * rstd + grad_sum  (RMS: no mean of d)
///   grad_weight = sum over the rows of grad * n
///   grad_bias   = sum over the rows of grad
/// grad_x is also the gradient of the residual.
struct NormBackward {
  const void* grad;      // of y: [rows, columns], columns adjacent
  const void* grad_sum;  // of sum, like grad; null if there is none
  const void* z;         // the normalized tensor: [rows, columns], columns adjacent
  const void* weight;    // as in Norm
  const void* mean;      // [rows] of the compute type; null for RMS norm
  const void* rstd;      // [rows] of the compute type
  void* grad_x;          // [rows, columns], contiguous; null if not wanted
  void* grad_weight;     // [columns] of weight_dtype; null if not wanted
  void* grad_bias;       // [columns] of weight_dtype; null if not wanted and for RMS norm
  Dtype dtype;           // dtype of grad, grad_sum, z and grad_x
  Dtype weight_dtype;
  bool centered;
  double weight_offset;
  int64_t rows;
  int64_t columns;
  int64_t grad_row_stride;
  int64_t grad_sum_row_stride;
  int64_t z_row_stride;
  void* workspace;  // has the size that cpu::split() returns; CUDA launchers allocate theirs
};

namespace cpu {

/// Computes the rows begin <= row < end.
TORCHKILN_EXPORT Status norm(const Norm& arguments, int64_t begin, int64_t end);

/// The split of a backward: tasks are chunks of rows; results are the columns, if a parameter's
/// gradient is wanted.
TORCHKILN_EXPORT Split split(const NormBackward& arguments);

/// Computes grad_x for the chunks begin <= chunk < end, and writes their partial sums to the
/// workspace.
TORCHKILN_EXPORT Status norm_backward(const NormBackward& arguments, int64_t begin, int64_t end);

/// Computes grad_weight and grad_bias for the columns begin <= column < end, from the partial sums
/// of all chunks.
TORCHKILN_EXPORT Status norm_backward_finish(const NormBackward& arguments, int64_t begin,
                                             int64_t end);

}  // namespace cpu

namespace cuda {

/// Runs on the current device, queued on `stream`. Rows that fit in the registers of a block or a
/// cluster are read once. Longer rows are split among blocks and read twice, the second time from
/// L2 if a row fits there.
TORCHKILN_EXPORT Status norm(const Norm& arguments, Allocate allocate, CUstream_st* stream);

/// Computes all gradients. No atomics: results are bitwise reproducible.
TORCHKILN_EXPORT Status norm_backward(const NormBackward& arguments, Allocate allocate,
                                      CUstream_st* stream);

}  // namespace cuda
}  // namespace torchkiln
