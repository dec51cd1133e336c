#pragma once

#include <cstddef>

#include "torchkiln/core/dtype.h"
#include "torchkiln/core/workspace.h"

struct CUstream_st;

namespace torchkiln {

/// Layer norm and RMS norm of each row of z = x + residual, or of x where there is no residual:
///   y = (z - mean) * rstd * (weight + weight_offset) + bias
/// with rstd = 1 / sqrt(mean of (z - mean)^2 + eps), and mean = 0 for RMS norm.
struct Norm {
  const void* x;         // [rows, columns], columns adjacent
  const void* residual;  // likewise; null when there is none
  const void* weight;    // [columns], contiguous; null for ones (without the offset)
  const void* bias;      // [columns], contiguous; null for zeros
  void* y;               // [rows, columns], contiguous
  void* sum;             // [rows, columns], contiguous: x + residual, rounded, which is what is
                         // normalized; null without a residual
  void* mean;            // [rows] of the compute type; null for RMS norm or when not wanted
  void* rstd;            // [rows] of the compute type; null when not wanted
  Dtype dtype;           // of x, residual, y and sum
  Dtype weight_dtype;    // of weight and bias: dtype, or float32 beside a half precision
  bool centered;         // layer norm; else RMS norm
  double eps;
  double weight_offset;
  int64_t rows;
  int64_t columns;
  int64_t x_row_stride;
  int64_t residual_row_stride;
};

/// Gradients of the same: with n = (z - mean) * rstd and d = grad * (weight + weight_offset)
///   grad_x      = (d - mean of d - n * mean of (d * n)) * rstd + grad_sum  (RMS: no mean of d)
///   grad_weight = sum over the rows of grad * n
///   grad_bias   = sum over the rows of grad
/// grad_x is the gradient of the residual, too.
struct NormBackward {
  const void* grad;      // of y: [rows, columns], columns adjacent
  const void* grad_sum;  // of sum, likewise; null when there is none
  const void* z;         // what was normalized: [rows, columns], columns adjacent
  const void* weight;    // as in Norm
  const void* mean;      // [rows] of the compute type; null for RMS norm
  const void* rstd;      // [rows] of the compute type
  void* grad_x;          // [rows, columns], contiguous; null when not wanted
  void* grad_weight;     // [columns] of weight_dtype; null when not wanted
  void* grad_bias;       // [columns] of weight_dtype; null when not wanted
  Dtype dtype;           // of grad, grad_sum, z and grad_x
  Dtype weight_dtype;
  bool centered;
  double weight_offset;
  int64_t rows;
  int64_t columns;
  int64_t grad_row_stride;
  int64_t grad_sum_row_stride;
  int64_t z_row_stride;
  void* workspace;  // of cpu::split(); CUDA launchers allocate theirs
};

namespace cpu {

/// The rows begin <= row < end.
TORCHKILN_EXPORT Status norm(const Norm& arguments, int64_t begin, int64_t end);

/// The rows in chunks; the results are the columns, where a parameter's gradient is wanted.
TORCHKILN_EXPORT Split split(const NormBackward& arguments);

/// grad_x of the chunks begin <= chunk < end, and their partial sums into the workspace.
TORCHKILN_EXPORT Status norm_backward(const NormBackward& arguments, int64_t begin, int64_t end);

/// grad_weight and grad_bias of the columns begin <= column < end, from the partial sums of all
/// chunks.
TORCHKILN_EXPORT Status norm_backward_finish(const NormBackward& arguments, int64_t begin,
                                             int64_t end);

}  // namespace cpu

namespace cuda {

/// On the current device, queued on `stream`: one pass over rows that the registers of a block or
/// a cluster hold; longer ones are read again by each step.
TORCHKILN_EXPORT Status norm(const Norm& arguments, CUstream_st* stream);

/// All gradients. No atomics: the result is the same, bit for bit, from run to run.
TORCHKILN_EXPORT Status norm_backward(const NormBackward& arguments, Allocate allocate,
                                      CUstream_st* stream);

}  // namespace cuda
}  // namespace torchkiln
