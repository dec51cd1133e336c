#pragma once

// Scalar formulas, each written once: g++ compiles them for the CPU loops, nvcc and NVRTC for the
// GPU kernels. They are templates over the compute type, not over the storage type. Activations are
// in activations.h.

#include "torchkiln/core/activations.h"

namespace torchkiln {

/// The result of a functor with two outputs.
template <class C>
struct Pair {
  C first;
  C second;
};

/// Three results of a functor.
template <class C>
struct Triple {
  C first, second, third;
};

struct Add {
  template <class C>
  TORCHKILN_FUNCTION C operator()(C a, C b) const {
    return a + b;
  }
};

/// a * b + c
struct MultiplyAdd {
  template <class C>
  TORCHKILN_FUNCTION C operator()(C a, C b, C c) const {
    return a * b + c;
  }
};

/// x * factor + c, where factor is a number
template <class C>
struct ScaleAdd {
  C factor;

  TORCHKILN_FUNCTION C operator()(C x, C c) const { return x * factor + c; }
};

/// a * b + shift, where shift is a number
template <class C>
struct MultiplyShift {
  C shift;

  TORCHKILN_FUNCTION C operator()(C a, C b) const { return a * b + shift; }
};

/// x * factor / divisor, for numbers in memory; 0 if the divisor is 0
template <class C>
struct ScaleBy {
  const C* factor;
  const C* divisor;  // null for 1

  TORCHKILN_FUNCTION C scale() const {
    if (divisor == nullptr) return *factor;
    return *divisor == 0 ? C{0} : *factor / *divisor;
  }
  TORCHKILN_FUNCTION C operator()(C x) const { return x * scale(); }
};

/// x * factor + shift, where both are numbers
template <class C>
struct ScaleShift {
  C factor;
  C shift;

  TORCHKILN_FUNCTION C operator()(C x) const { return x * factor + shift; }
};

/// The gradients of a * b with respect to a and b.
struct MultiplyGradient {
  template <class C>
  TORCHKILN_FUNCTION Pair<C> operator()(C grad, C a, C b) const {
    return {grad * b, grad * a};
  }
};

/// activation(x)
template <class Act, class Math>
struct Activated {
  template <class C>
  TORCHKILN_FUNCTION C operator()(C x) const {
    return Act::template value<Math>(x);
  }
};

/// The gradient of activation(x) with respect to x, computed from the tensor that the activation
/// saves.
template <class Act, class Math>
struct ActivatedGradient {
  template <class C>
  TORCHKILN_FUNCTION C operator()(C grad, C saved) const {
    return Act::template gradient<Math>(grad, saved);
  }
};

/// activation(x * scale + bias)
template <class Act, class Math, class C>
struct BiasActivated {
  C scale;

  TORCHKILN_FUNCTION C operator()(C x, C bias) const {
    return Act::template value<Math>(x * scale + bias);
  }
};

/// The gradient of activation(x * scale + bias) with respect to x, computed from the inputs.
template <class Act, class Math, class C>
struct BiasActivatedGradient {
  C scale;

  TORCHKILN_FUNCTION C operator()(C grad, C x, C bias) const {
    return gradient_from_input<Act, Math>(grad, x * scale + bias) * scale;
  }
};

/// activation(gate) * up
template <class Act, class Math>
struct Gated {
  template <class C>
  TORCHKILN_FUNCTION C operator()(C gate, C up) const {
    return Act::template value<Math>(gate) * up;
  }
};

/// The gradients of activation(gate) * up with respect to gate and up.
template <class Act, class Math>
struct GatedGradient {
  template <class C>
  TORCHKILN_FUNCTION Pair<C> operator()(C grad, C gate, C up) const {
    return {Act::template gradient<Math>(grad * up, gate), grad * Act::template value<Math>(gate)};
  }
};

/// The results of GatedGradient, and activation(gate) * up.
template <class Act, class Math>
struct GatedGradientAndValue {
  template <class C>
  TORCHKILN_FUNCTION Triple<C> operator()(C grad, C gate, C up) const {
    const C value = Act::template value<Math>(gate);
    return {Act::template gradient<Math>(grad * up, gate), grad * value, value * up};
  }
};

}  // namespace torchkiln
