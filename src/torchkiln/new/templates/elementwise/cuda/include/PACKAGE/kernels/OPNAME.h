#pragma once

// x * sigmoid(scale * gate): the functors, which compute one element, and the launchers, which
// apply a functor to whole tensors. No torch: kernels take pointers, sizes and strides.

#include "torchkiln/core/functors.h"
#include "torchkiln/core/layout.h"

struct CUstream_st;

namespace PACKAGE {
namespace OPNAME_parts {

/// The formula. g++ compiles it for the CPU, nvcc for the GPU. C is the type of the computation:
/// double for float64, else float. Half precision is computed in float and rounded once, when the
/// result is stored. Math has exp, log, tanh ... for that type and device.
template <class Math, class C>
struct Formula {
  C scale;

  TORCHKILN_FUNCTION C operator()(C x, C gate) const {
    return x * torchkiln::sigmoid<Math>(scale * gate);
  }
};

/// The gradients of x and gate, from the incoming gradient and the inputs.
template <class Math, class C>
struct Gradients {
  C scale;

  TORCHKILN_FUNCTION torchkiln::Pair<C> operator()(C grad, C x, C gate) const {
    const auto [value, slope] = torchkiln::sigmoid_and_slope<Math>(scale * gate);
    return {grad * value, grad * x * slope * scale};
  }
};

}  // namespace OPNAME_parts

namespace cpu {

/// Computes the elements begin <= i < end. The inputs are {x, gate}; those of the backward are
/// {grad, x, gate}, and it has two outputs.
TORCHKILN_EXPORT torchkiln::Status OPNAME(const torchkiln::Elementwise<2>& arguments, double scale,
                                          int64_t begin, int64_t end);
TORCHKILN_EXPORT torchkiln::Status OPNAME_backward(const torchkiln::Elementwise<3, 2>& arguments,
                                                   double scale, int64_t begin, int64_t end);

}  // namespace cpu

namespace cuda {

/// The same functions on the current device, for all elements, queued on `stream`.
TORCHKILN_EXPORT torchkiln::Status OPNAME(const torchkiln::Elementwise<2>& arguments, double scale,
                                          CUstream_st* stream);
TORCHKILN_EXPORT torchkiln::Status OPNAME_backward(const torchkiln::Elementwise<3, 2>& arguments,
                                                   double scale, CUstream_st* stream);

}  // namespace cuda
}  // namespace PACKAGE
