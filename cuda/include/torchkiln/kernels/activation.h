#pragma once

#include "torchkiln/core/activations.h"
#include "torchkiln/core/layout.h"

struct CUstream_st;

namespace torchkiln {
namespace cpu {

/// out[i] = activation(x[i]) for the elements begin <= i < end; `out` may be x itself.
TORCHKILN_EXPORT Status activation(const Elementwise<1>& arguments, Activation activation,
                                   int64_t begin, int64_t end);

/// The gradient with respect to x; the inputs are {grad, saved}, where saved is x or the output,
/// see saved_by(activation).
TORCHKILN_EXPORT Status activation_backward(const Elementwise<2>& arguments, Activation activation,
                                            int64_t begin, int64_t end);

}  // namespace cpu

namespace cuda {

/// The functions of namespace cpu on the current device, queued on `stream`.
TORCHKILN_EXPORT Status activation(const Elementwise<1>& arguments, Activation activation,
                                   CUstream_st* stream);
TORCHKILN_EXPORT Status activation_backward(const Elementwise<2>& arguments, Activation activation,
                                            CUstream_st* stream);

/// The gradient with respect to x and the output, which may overwrite `grad`; the inputs are
/// {grad, x}.
TORCHKILN_EXPORT Status activation_backward_with_output(const Elementwise<2, 2>& arguments,
                                                        Activation activation, CUstream_st* stream);

}  // namespace cuda
}  // namespace torchkiln
