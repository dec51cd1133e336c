#pragma once

#include <cstddef>

#include "torchkiln/core/activations.h"
#include "torchkiln/core/layout.h"
#include "torchkiln/core/workspace.h"

struct CUstream_st;

namespace torchkiln {

/// What backward reads beside the gradient. Never the output: a rounded one would cost the
/// derivative of tanh near 1 all its digits in half precision.
inline Saved kept_by_bias_act(Activation activation) {
  const Saved saved = saved_by(activation);
  return saved == Saved::output ? Saved::input : saved;
}

/// out = activation(x * scale + bias), contiguous; the inputs of `elements` are {x, bias}.
struct BiasAct {
  Elementwise<2> elements;
  Activation activation;
  double scale;
  /// Where backward needs no more than the sign of the output, it may be kept: bit i % 8 of byte
  /// i / 8 tells whether out[i] is not <= 0. Null when nobody wants it.
  uint8_t* signs;
};

/// Gradients of output = activation(x * scale + bias), with x seen as [rows, columns] and bias as
/// [columns]:
///   grad_x    = grad * activation'(x * scale + bias) * scale
///   grad_bias = sum over the rows of grad * activation'(x * scale + bias)
struct BiasActBackward {
  const void* grad;   // [rows, columns], any strides
  const void* saved;  // x, the signs of the output, or nothing, as kept_by_bias_act says
  const void* bias;   // [columns]; read beside x; null for none, where grad_bias is wanted
  void* grad_x;       // [rows, columns], contiguous; null when not wanted
  void* grad_bias;    // [columns]; null when not wanted
  Dtype dtype;        // of all but bias and grad_bias
  Dtype bias_dtype;   // dtype, or float32 beside a half precision
  Activation activation;
  double scale;
  int64_t rows;
  int64_t columns;
  int64_t grad_row_stride;
  int64_t grad_column_stride;
  int64_t saved_row_stride;
  int64_t saved_column_stride;
  int64_t bias_stride;
  void* workspace;  // of cpu::split(); CUDA launchers allocate theirs
};

namespace cpu {

/// For the elements begin <= i < end; where signs are wanted, begin is a multiple of 8.
TORCHKILN_EXPORT Status bias_act(const BiasAct& arguments, int64_t begin, int64_t end);

/// The rows in chunks; the results are the columns, where grad_bias is wanted.
TORCHKILN_EXPORT Split split(const BiasActBackward& arguments);

/// grad_x of the chunks begin <= chunk < end, and their partial sums into the workspace.
TORCHKILN_EXPORT Status bias_act_backward(const BiasActBackward& arguments, int64_t begin,
                                          int64_t end);

/// grad_bias of the columns begin <= column < end, from the partial sums of all chunks.
TORCHKILN_EXPORT Status bias_act_backward_finish(const BiasActBackward& arguments, int64_t begin,
                                                 int64_t end);

}  // namespace cpu

namespace cuda {

/// On the current device, queued on `stream`.
TORCHKILN_EXPORT Status bias_act(const BiasAct& arguments, CUstream_st* stream);

/// Both gradients, in one pass over grad and what was saved, and a short second one over partial
/// sums. No atomics: the result is the same, bit for bit, from run to run.
TORCHKILN_EXPORT Status bias_act_backward(const BiasActBackward& arguments, Allocate allocate,
                                          CUstream_st* stream);

}  // namespace cuda
}  // namespace torchkiln
