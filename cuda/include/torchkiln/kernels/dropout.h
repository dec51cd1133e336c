#pragma once

#include <cstddef>

#include "torchkiln/core/layout.h"
#include "torchkiln/core/philox.h"
#include "torchkiln/core/workspace.h"

struct CUstream_st;

namespace torchkiln {

/// Selects the elements to keep by random words. The word of an element depends on its index in the
/// contiguous output, but not on strides, dtype and device.
struct Dropout {
  RandomState random;
  uint32_t last;  // largest random word that keeps an element: last_word(1 - p)
  double scale;   // factor of kept elements: 1 / (1 - p)
};

/// grad_x = kept ? grad * scale : 0, and grad_bias = sum of grad_x over the rows, with grad seen as
/// [rows, columns].
struct DropoutBackward {
  const void* grad;  // [rows, columns], any strides
  void* grad_x;      // [rows, columns], contiguous; null if not wanted
  void* grad_bias;   // [columns]
  Dtype dtype;       // dtype of all tensors except grad_bias
  Dtype bias_dtype;  // dtype, or float32 for half precision
  int64_t rows;
  int64_t columns;
  int64_t grad_row_stride;
  int64_t grad_column_stride;
  Dropout dropout;
};

namespace cpu {

/// out = (kept ? x * scale : 0) + residual for the elements begin <= i < end of the contiguous
/// output; the inputs are {x, residual}, or {x, bias, residual} with (x + bias) instead of x.
TORCHKILN_EXPORT Status dropout_add(const Elementwise<2>& arguments, const Dropout& dropout,
                                    int64_t begin, int64_t end);
TORCHKILN_EXPORT Status bias_dropout_add(const Elementwise<3>& arguments, const Dropout& dropout,
                                         int64_t begin, int64_t end);

/// out = kept ? grad * scale : 0; the input is {grad}.
TORCHKILN_EXPORT Status dropout_backward(const Elementwise<1>& arguments, const Dropout& dropout,
                                         int64_t begin, int64_t end);

}  // namespace cpu

namespace cuda {

/// Writes {seed, offset} to random.record.
TORCHKILN_EXPORT Status record_random(const RandomState& random, CUstream_st* stream);

/// The functions of namespace cpu on the current device, queued on `stream`.
TORCHKILN_EXPORT Status dropout_add(const Elementwise<2>& arguments, const Dropout& dropout,
                                    CUstream_st* stream);
TORCHKILN_EXPORT Status bias_dropout_add(const Elementwise<3>& arguments, const Dropout& dropout,
                                         CUstream_st* stream);
TORCHKILN_EXPORT Status dropout_backward(const Elementwise<1>& arguments, const Dropout& dropout,
                                         CUstream_st* stream);

/// Computes both gradients in one pass over grad; a short second kernel adds partial sums. For one
/// long row both gradients are equal, and the second one is a copy of the first.
TORCHKILN_EXPORT Status bias_dropout_backward(const DropoutBackward& arguments, Allocate allocate,
                                              CUstream_st* stream);

}  // namespace cuda
}  // namespace torchkiln
