#pragma once

#include <cstddef>

#include "torchkiln/layout.h"

struct CUstream_st;

namespace torchkiln {

/// Gradients of output = relu(x * scale + bias), with x seen as [rows, columns] and bias as
/// [columns]:
///   grad_x    = scale * grad where output > 0, else 0
///   grad_bias = sum over the rows of grad where output > 0
struct ScaleBiasReluBackward {
  const void* grad;    // [rows, columns], any strides
  const void* output;  // [rows, columns], contiguous
  void* grad_x;        // [rows, columns], contiguous; null when not wanted
  void* grad_bias;     // [columns]; null when not wanted
  Dtype dtype;         // of all but grad_bias
  Dtype bias_dtype;    // dtype, or float32 beside a half precision
  int64_t rows;
  int64_t columns;
  int64_t grad_row_stride;
  int64_t grad_column_stride;
  double scale;
  void* workspace;  // workspace_bytes() of them, 16-byte aligned; null when that is 0
};

namespace cpu {

/// out = relu(x * scale + bias) for the elements begin <= i < end; the inputs are {x, bias}.
TORCHKILN_EXPORT Status scale_bias_relu(const Elementwise<2>& arguments, double scale,
                                        int64_t begin, int64_t end);

/// The rows are cut into chunks, by their number alone: the sums do not depend on how many threads
/// there are.
TORCHKILN_EXPORT int64_t chunk_count(const ScaleBiasReluBackward& arguments);
TORCHKILN_EXPORT size_t workspace_bytes(const ScaleBiasReluBackward& arguments);

/// grad_x of the chunks begin <= chunk < end, and their partial sums into the workspace.
TORCHKILN_EXPORT Status scale_bias_relu_backward(const ScaleBiasReluBackward& arguments,
                                                 int64_t begin, int64_t end);

/// grad_bias of the columns begin <= column < end, from the partial sums of all chunks.
TORCHKILN_EXPORT Status scale_bias_relu_backward_finish(const ScaleBiasReluBackward& arguments,
                                                        int64_t begin, int64_t end);

}  // namespace cpu

namespace cuda {

/// out = relu(x * scale + bias) on the current device, queued on `stream`; the inputs are {x,
/// bias}.
TORCHKILN_EXPORT Status scale_bias_relu(const Elementwise<2>& arguments, double scale,
                                        CUstream_st* stream);

TORCHKILN_EXPORT size_t workspace_bytes(const ScaleBiasReluBackward& arguments);

/// Both gradients, in one pass over grad and output and a short second one over partial sums. No
/// atomics: the result is the same, bit for bit, from run to run.
TORCHKILN_EXPORT Status scale_bias_relu_backward(const ScaleBiasReluBackward& arguments,
                                                 CUstream_st* stream);

}  // namespace cuda
}  // namespace torchkiln
