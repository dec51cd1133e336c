#pragma once

// x * sigmoid(scale * gate): the formula, once for the CPU and for CUDA, and its launchers.

#include "torchkiln/core/functors.h"
#include "torchkiln/core/layout.h"

struct CUstream_st;

namespace PACKAGE {
namespace OPNAME_parts {

/// Math has the transcendental functions, C is the type that is computed in.
template <class Math, class C>
struct Formula {
  C scale;

  TORCHKILN_FUNCTION C operator()(C x, C gate) const {
    return x * torchkiln::sigmoid<Math>(scale * gate);
  }
};

/// The gradients for x and gate.
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

/// For the elements begin <= i < end. The inputs are {x, gate}, of the backward {grad, x, gate}.
TORCHKILN_EXPORT torchkiln::Status OPNAME(const torchkiln::Elementwise<2>& arguments, double scale,
                                          int64_t begin, int64_t end);
TORCHKILN_EXPORT torchkiln::Status OPNAME_backward(const torchkiln::Elementwise<3, 2>& arguments,
                                                   double scale, int64_t begin, int64_t end);

}  // namespace cpu

namespace cuda {

/// As their namesakes above, on the current device, queued on `stream`.
TORCHKILN_EXPORT torchkiln::Status OPNAME(const torchkiln::Elementwise<2>& arguments, double scale,
                                          CUstream_st* stream);
TORCHKILN_EXPORT torchkiln::Status OPNAME_backward(const torchkiln::Elementwise<3, 2>& arguments,
                                                   double scale, CUstream_st* stream);

}  // namespace cuda
}  // namespace PACKAGE
