#include "torchkiln/kernels/activation.h"

#include "elementwise.h"
#include "isa.h"

namespace torchkiln::cpu {
namespace TORCHKILN_ISA {

Status activation(const Elementwise<1>& arguments, Activation activation, int64_t begin,
                  int64_t end) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return elementwise_activated<T, Activated>(activation, arguments, begin, end, Activations{});
  });
}

Status activation_backward(const Elementwise<2>& arguments, Activation activation, int64_t begin,
                           int64_t end) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return elementwise_activated<T, ActivatedGradient>(activation, arguments, begin, end,
                                                       Activations{});
  });
}

}  // namespace TORCHKILN_ISA

#ifdef TORCHKILN_BASELINE

TORCHKILN_DECLARE_VARIANTS(activation)
TORCHKILN_DECLARE_VARIANTS(activation_backward)

Status activation(const Elementwise<1>& arguments, Activation activation, int64_t begin,
                  int64_t end) {
  return TORCHKILN_BEST_VARIANT(activation)(arguments, activation, begin, end);
}

Status activation_backward(const Elementwise<2>& arguments, Activation activation, int64_t begin,
                           int64_t end) {
  return TORCHKILN_BEST_VARIANT(activation_backward)(arguments, activation, begin, end);
}

#endif

}  // namespace torchkiln::cpu
