#include "torchkiln/kernels/activation.h"

#include "detail/half_table.h"
#include "torchkiln/cpu/isa.h"

namespace torchkiln::cpu {
namespace TORCHKILN_ISA {
namespace {

/// Activations with tables for half precision: a lookup takes less time than computing them. With
/// AVX-512, silu and sigmoid of float16 are computed faster.
template <class T>
struct TabulatedFor {
  using type = TypeList<Gelu, GeluTanh, QuickGelu, Silu, Sigmoid, Tanh>;
};
#ifdef __AVX512F__
template <>
struct TabulatedFor<Half> {
  using type = TypeList<Gelu, GeluTanh, QuickGelu, Tanh>;
};
#endif
template <class T>
using Tabulated = typename TabulatedFor<T>::type;
/// Activations whose gradient is grad times a function of the input alone, for which there can be a
/// table.
using TabulatedSlopes = TypeList<Gelu, GeluTanh, QuickGelu, Silu>;
/// Whether gradients are looked up. With AVX-512, computing them is as fast.
#ifdef __AVX512F__
constexpr bool kLooksUpSlopes = false;
#else
constexpr bool kLooksUpSlopes = true;
#endif

template <class Act>
struct ValueOf {
  float operator()(float z) const { return Act::template value<ExactMath>(z); }
};
template <class Act>
struct SlopeOf {
  float operator()(float z) const { return Act::template gradient<ExactMath>(1.0f, z); }
};

/// The table of Function<activation>; null if the activation is not in `list`.
template <class T, class To, template <class> class Function, class List>
const To* table_of(Activation activation, List list) {
  const To* table = nullptr;
  with_activation(
      activation,
      [&](auto tag) { table = half_table<T, To, Function<typename decltype(tag)::type>>(); }, list);
  return table;
}

/// look_up() and look_up_slopes() return false, and do nothing, if the activation has no table.
template <class T>
bool look_up(Activation activation, const Elementwise<1>& arguments, int64_t begin, int64_t end) {
  const T* const table = table_of<T, T, ValueOf>(activation, Tabulated<T>{});
  if (table == nullptr) return false;
  for_each_run<T>(arguments, begin, end, [table](T* out, const T* const(&in)[1], int64_t count) {
    for (int64_t i = 0; i < count; ++i) out[i] = table[in[0][i].bits];
  });
  return true;
}

template <class T>
bool look_up_slopes(Activation activation, const Elementwise<2>& arguments, int64_t begin,
                    int64_t end) {
  const float* const table = table_of<T, float, SlopeOf>(activation, TabulatedSlopes{});
  if (table == nullptr) return false;
  for_each_run<T>(arguments, begin, end, [table](T* out, const T* const(&in)[2], int64_t count) {
    float slopes[kRun];
    for (int64_t i = 0; i < count; ++i) slopes[i] = table[in[1][i].bits];
    float grads[kRun];
    widen_run(grads, in[0], 1, count);
    for (int64_t i = 0; i < count; ++i) grads[i] *= slopes[i];
    narrow_run(out, grads, count);
  });
  return true;
}

}  // namespace

Status activation(const Elementwise<1>& arguments, Activation activation, int64_t begin,
                  int64_t end) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (sizeof(T) == 2) {
      if (suits_table<T>(arguments, begin, end) && look_up<T>(activation, arguments, begin, end))
        return Status{};
    }
    return elementwise_activated<T, Activated>(activation, arguments, begin, end, Activations{});
  });
}

Status activation_backward(const Elementwise<2>& arguments, Activation activation, int64_t begin,
                           int64_t end) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (sizeof(T) == 2 && kLooksUpSlopes) {
      if (suits_table<T>(arguments, begin, end) &&
          look_up_slopes<T>(activation, arguments, begin, end))
        return Status{};
    }
    return elementwise_activated<T, ActivatedGradient>(activation, arguments, begin, end,
                                                       Activations{});
  });
}

}  // namespace TORCHKILN_ISA

TORCHKILN_CPU_ENTRY(activation,
                    (const Elementwise<1>& arguments, Activation activation, int64_t begin,
                     int64_t end),
                    (arguments, activation, begin, end))
TORCHKILN_CPU_ENTRY(activation_backward,
                    (const Elementwise<2>& arguments, Activation activation, int64_t begin,
                     int64_t end),
                    (arguments, activation, begin, end))

}  // namespace torchkiln::cpu
