#include "torchkiln/kernels/activation.h"

#include "torchkiln/cpu/elementwise.h"
#include "torchkiln/cpu/isa.h"

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

TORCHKILN_CPU_ENTRY(activation,
                    (const Elementwise<1>& arguments, Activation activation, int64_t begin,
                     int64_t end),
                    (arguments, activation, begin, end))
TORCHKILN_CPU_ENTRY(activation_backward,
                    (const Elementwise<2>& arguments, Activation activation, int64_t begin,
                     int64_t end),
                    (arguments, activation, begin, end))

}  // namespace torchkiln::cpu
