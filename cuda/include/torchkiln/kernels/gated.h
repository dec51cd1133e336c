#pragma once

#include "torchkiln/core/activations.h"
#include "torchkiln/core/layout.h"

struct CUstream_st;

namespace torchkiln {
namespace cpu {

/// out[i] = activation(gate[i]) * up[i] for begin <= i < end; the inputs are {gate, up}, the
/// activation is one of Gates.
TORCHKILN_EXPORT Status gated(const Elementwise<2>& arguments, Activation activation, int64_t begin,
                              int64_t end);

/// The gradients with respect to {gate, up}; the inputs are {grad, gate, up}.
TORCHKILN_EXPORT Status gated_backward(const Elementwise<3, 2>& arguments, Activation activation,
                                       int64_t begin, int64_t end);

/// gated_backward() with the output of gated() as a third result.
TORCHKILN_EXPORT Status gated_backward_with_output(const Elementwise<3, 3>& arguments,
                                                   Activation activation, int64_t begin,
                                                   int64_t end);

}  // namespace cpu

namespace cuda {

/// The functions of namespace cpu on the current device, queued on `stream`.
TORCHKILN_EXPORT Status gated(const Elementwise<2>& arguments, Activation activation,
                              CUstream_st* stream);
TORCHKILN_EXPORT Status gated_backward(const Elementwise<3, 2>& arguments, Activation activation,
                                       CUstream_st* stream);
TORCHKILN_EXPORT Status gated_backward_with_output(const Elementwise<3, 3>& arguments,
                                                   Activation activation, CUstream_st* stream);

}  // namespace cuda
}  // namespace torchkiln
