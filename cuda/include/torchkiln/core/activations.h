#pragma once

// Activations. To add one, write its functor here and append its name to the list Activations:
// bias_act, linear and the op of its own name then support it on the CPU and on the GPU.

#include <cstdint>
#include <type_traits>

#include "torchkiln/core/dtype.h"
#include "torchkiln/core/scalar_math.h"

namespace torchkiln {

/// The tensor from which an activation's derivative is computed.
enum class Saved {
  nothing,  // the derivative is constant
  sign,     // the sign of the output: the output itself, or one bit per element
  input,
  output
};

/// z
struct None {
  static constexpr const char* kName = "none";
  static constexpr Saved kSaved = Saved::nothing;

  template <class Math, class C>
  TORCHKILN_FUNCTION static C value(C z) {
    return z;
  }
  template <class Math, class C>
  TORCHKILN_FUNCTION static C gradient(C grad, C) {
    return grad;
  }
};

/// z^2
struct Square {
  static constexpr const char* kName = "square";
  static constexpr Saved kSaved = Saved::input;

  template <class Math, class C>
  TORCHKILN_FUNCTION static C value(C z) {
    return z * z;
  }
  template <class Math, class C>
  TORCHKILN_FUNCTION static C gradient(C grad, C z) {
    return grad * (z + z);
  }
};

/// max(z, 0). NaN passes through, and -0 becomes +0.
struct Relu {
  static constexpr const char* kName = "relu";
  static constexpr Saved kSaved = Saved::sign;

  template <class Math, class C>
  TORCHKILN_FUNCTION static C value(C z) {
    return z <= C(0) ? C(0) : z;
  }
  template <class Math, class C>
  TORCHKILN_FUNCTION static C gradient(C grad, C output) {
    return output <= C(0) ? C(0) : grad;
  }
};

/// max(z, 0)^2. NaN passes through.
struct Relu2 {
  static constexpr const char* kName = "relu2";
  static constexpr Saved kSaved = Saved::input;

  template <class Math, class C>
  TORCHKILN_FUNCTION static C value(C z) {
    return Square::value<Math>(Relu::value<Math>(z));
  }
  template <class Math, class C>
  TORCHKILN_FUNCTION static C gradient(C grad, C z) {
    return Relu::gradient<Math>(Square::gradient<Math>(grad, z), z);
  }
};

/// z F(z), with F the cumulative normal distribution
struct Gelu {
  static constexpr const char* kName = "gelu";
  static constexpr Saved kSaved = Saved::input;

  template <class Math, class C>
  TORCHKILN_FUNCTION static C value(C z) {
    return Math::gelu(z);
  }
  template <class Math, class C>
  TORCHKILN_FUNCTION static C gradient(C grad, C z) {
    return grad * gelu_slope<Math>(z);
  }
};

/// z (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (z + 0.044715 z^3). Computed as z sigmoid(2 u), which
/// needs one exponential and has no cancellation.
struct GeluTanh {
  static constexpr const char* kName = "gelu_tanh";
  static constexpr Saved kSaved = Saved::input;

  template <class Math, class C>
  TORCHKILN_FUNCTION static C value(C z) {
    return z * torchkiln::sigmoid<Math>(z * (kLinear<C> + kCubic<C> * z * z));
  }
  template <class Math, class C>
  TORCHKILN_FUNCTION static C gradient(C grad, C z) {
    const C size = z < C(0) ? -z : z;
    // The argument is bounded, because z^2 overflows. Beyond the bound the derivative is 0 or 1.
    const C square = size < C(64) ? z * z : C(4096);
    return grad * sigmoid_gate_slope<Math>(z, size * (kLinear<C> + kCubic<C> * square),
                                           kLinear<C> + C(3) * kCubic<C> * square);
  }

 private:
  template <class C>
  static constexpr C kLinear = C(1.59576912160573071175978423974);  // 2 sqrt(2 / pi)
  template <class C>
  static constexpr C kCubic = C(0.0713548162726002487763387422823);
};

/// z sigmoid(1.702 z)
struct QuickGelu {
  static constexpr const char* kName = "quick_gelu";
  static constexpr Saved kSaved = Saved::input;

  template <class Math, class C>
  TORCHKILN_FUNCTION static C value(C z) {
    return z * torchkiln::sigmoid<Math>(kFactor<C> * z);
  }
  template <class Math, class C>
  TORCHKILN_FUNCTION static C gradient(C grad, C z) {
    return grad * sigmoid_gate_slope<Math>(z, kFactor<C> * (z < C(0) ? -z : z), kFactor<C>);
  }

 private:
  template <class C>
  static constexpr C kFactor = C(1.702);
};

/// z sigmoid(z)
struct Silu {
  static constexpr const char* kName = "silu";
  static constexpr Saved kSaved = Saved::input;

  template <class Math, class C>
  TORCHKILN_FUNCTION static C value(C z) {
    return z * torchkiln::sigmoid<Math>(z);
  }
  template <class Math, class C>
  TORCHKILN_FUNCTION static C gradient(C grad, C z) {
    return grad * sigmoid_gate_slope<Math>(z, z < C(0) ? -z : z, C(1));
  }
};

/// 1 / (1 + e^-z)
struct Sigmoid {
  static constexpr const char* kName = "sigmoid";
  static constexpr Saved kSaved = Saved::output;

  template <class Math, class C>
  TORCHKILN_FUNCTION static C value(C z) {
    return torchkiln::sigmoid<Math>(z);
  }
  template <class Math, class C>
  TORCHKILN_FUNCTION static C gradient(C grad, C output) {
    return grad * (output * (C(1) - output));
  }
};

struct Tanh {
  static constexpr const char* kName = "tanh";
  static constexpr Saved kSaved = Saved::output;

  template <class Math, class C>
  TORCHKILN_FUNCTION static C value(C z) {
    return Math::tanh(z);
  }
  template <class Math, class C>
  TORCHKILN_FUNCTION static C gradient(C grad, C output) {
    return grad * (C(1) - output * output);
  }
};

template <class... Functors>
struct TypeList {};

using Activations =
    TypeList<None, Square, Relu, Relu2, Gelu, GeluTanh, QuickGelu, Silu, Sigmoid, Tanh>;

/// Activations that can gate: swiglu and geglu use these.
using Gates = TypeList<Silu, Gelu, GeluTanh>;

/// An activation as a value: the index of its functor in Activations.
enum class Activation : int32_t {};

namespace detail {
/// The index of a functor in a list. It is a class, because g++ 14 rejects a constexpr function
/// template in the initializer of kActivation.
template <class Functor, class List>
struct IndexOf;
template <class Functor, class... Others>
struct IndexOf<Functor, TypeList<Functor, Others...>> {
  static constexpr int32_t value = 0;
};
template <class Functor, class First, class... Others>
struct IndexOf<Functor, TypeList<First, Others...>> {
  static constexpr int32_t value = 1 + IndexOf<Functor, TypeList<Others...>>::value;
};
}  // namespace detail

template <class Functor>
inline constexpr Activation kActivation =
    static_cast<Activation>(detail::IndexOf<Functor, Activations>::value);

/// Calls body(TypeTag<Functor>{}) for the functor whose index is `activation`.
#ifdef __CUDACC__
#pragma nv_exec_check_disable
#endif
template <class Body, class... Functors>
TORCHKILN_FUNCTION void with_activation(Activation activation, const Body& body,
                                        TypeList<Functors...>) {
  (void)((kActivation<Functors> == activation && (body(TypeTag<Functors>{}), true)) || ...);
}

/// Calls body(TypeTag<Functor>{}) for every functor of the list.
template <class Body, class... Functors>
void for_each_activation(const Body& body, TypeList<Functors...>) {
  (body(TypeTag<Functors>{}), ...);
}

/// The gradient, computed from the input even for activations that save their output.
template <class Functor, class Math, class C>
TORCHKILN_FUNCTION C gradient_from_input(C grad, C z) {
  if constexpr (Functor::kSaved == Saved::output || Functor::kSaved == Saved::sign) {
    return Functor::template gradient<Math>(grad, Functor::template value<Math>(z));
  } else {
    return Functor::template gradient<Math>(grad, z);
  }
}

/// The tensor from which the derivative of `activation` is computed.
inline Saved saved_by(Activation activation) {
  Saved saved = Saved::nothing;
  with_activation(
      activation, [&](auto tag) { saved = decltype(tag)::type::kSaved; }, Activations{});
  return saved;
}

}  // namespace torchkiln
