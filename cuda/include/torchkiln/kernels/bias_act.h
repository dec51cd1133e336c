#pragma once

#include <cstddef>

#include "torchkiln/core/activations.h"
#include "torchkiln/core/layout.h"
#include "torchkiln/core/workspace.h"

struct CUstream_st;

namespace torchkiln {

/// The tensor that backward reads besides the gradient. It is never the output: in half precision
/// its rounding would cost the derivative of tanh near 1 all digits.
inline Saved kept_by_bias_act(Activation activation) {
  const Saved saved = saved_by(activation);
  return saved == Saved::output ? Saved::input : saved;
}

/// out = activation(x * scale + bias), contiguous; the inputs of `elements` are {x, bias}.
struct BiasAct {
  Elementwise<2> elements;
  Activation activation;
  double scale;
  /// The signs of the output, if backward needs only those: bit i % 8 of byte i / 8 is set if
  /// out[i] is not <= 0. Null if backward does not need them.
  uint8_t* signs;
};

/// Gradients of output = activation(x * scale + bias), with x seen as [rows, columns] and bias as
/// [columns]:
///   grad_x    = grad * activation'(x * scale + bias) * scale
///   grad_bias = sum over the rows of grad * activation'(x * scale + bias)
struct BiasActBackward {
  const void* grad;   // [rows, columns], any strides
  const void* saved;  // x, the signs of the output, or nothing, see kept_by_bias_act()
  const void* bias;   // [columns]; only used if `saved` is x; null if there is none
  void* grad_x;       // [rows, columns], contiguous; null if not wanted
  void* grad_bias;    // [columns]; null if not wanted
  Dtype dtype;        // dtype of all tensors except bias and grad_bias
  Dtype bias_dtype;   // dtype, or float32 for half precision
  Activation activation;
  double scale;
  int64_t rows;
  int64_t columns;
  int64_t grad_row_stride;
  int64_t grad_column_stride;
  int64_t saved_row_stride;
  int64_t saved_column_stride;
  int64_t bias_stride;
  void* workspace;  // has the size that cpu::split() returns; CUDA launchers allocate theirs
};

namespace cpu {

/// Computes the elements begin <= i < end; if signs are wanted, begin is a multiple of 8.
TORCHKILN_EXPORT Status bias_act(const BiasAct& arguments, int64_t begin, int64_t end);

/// The split of a backward: tasks are chunks of rows; results are the columns, if grad_bias is
/// wanted.
TORCHKILN_EXPORT Split split(const BiasActBackward& arguments);

/// Computes grad_x for the chunks begin <= chunk < end, and writes their partial sums to the
/// workspace.
TORCHKILN_EXPORT Status bias_act_backward(const BiasActBackward& arguments, int64_t begin,
                                          int64_t end);

/// Computes grad_bias for the columns begin <= column < end, from the partial sums of all chunks.
TORCHKILN_EXPORT Status bias_act_backward_finish(const BiasActBackward& arguments, int64_t begin,
                                                 int64_t end);

}  // namespace cpu

namespace cuda {

/// Runs on the current device, queued on `stream`.
TORCHKILN_EXPORT Status bias_act(const BiasAct& arguments, CUstream_st* stream);

/// Computes both gradients in one pass over grad and the saved tensor; a short second kernel adds
/// partial sums. For one long row, each gradient takes a pass of its own. No atomics: results are
/// bitwise reproducible.
TORCHKILN_EXPORT Status bias_act_backward(const BiasActBackward& arguments, Allocate allocate,
                                          CUstream_st* stream);

}  // namespace cuda
}  // namespace torchkiln
