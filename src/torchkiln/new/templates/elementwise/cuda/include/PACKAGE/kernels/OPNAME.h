#pragma once

#include "torchkiln/core/formula.h"

namespace PACKAGE::formulas {

/// x * sigmoid(scale * gate), of one element; the build makes the kernels. C is the type of the
/// computation: double for float64, else float. Results are rounded once, when they are stored.
/// Math has exp, log, tanh ... of that type, on the CPU and on the GPU.
struct TORCHKILN_VISIBLE TYPENAME : torchkiln::Formula</*tensors*/ 2, /*numbers*/ 1> {
  template <class Math, class C>
  TORCHKILN_FUNCTION static C value(C x, C gate, C scale) {
    return x * torchkiln::sigmoid<Math>(scale * gate);
  }

  /// The gradients of x and gate, from the incoming gradient and the arguments.
  template <class Math, class C>
  TORCHKILN_FUNCTION static torchkiln::Pair<C> gradients(C grad, C x, C gate, C scale) {
    const auto [value, slope] = torchkiln::sigmoid_and_slope<Math>(scale * gate);
    return {grad * value, grad * x * slope * scale};
  }
};

}  // namespace PACKAGE::formulas
