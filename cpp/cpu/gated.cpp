#include "torchkiln/kernels/gated.h"

#include "torchkiln/cpu/elementwise.h"
#include "torchkiln/cpu/isa.h"

namespace torchkiln::cpu {
namespace TORCHKILN_ISA {

Status gated(const Elementwise<2>& arguments, Activation activation, int64_t begin, int64_t end) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return elementwise_activated<T, Gated>(activation, arguments, begin, end, Gates{});
  });
}

Status gated_backward(const Elementwise<3, 2>& arguments, Activation activation, int64_t begin,
                      int64_t end) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return elementwise_activated<T, GatedGradient>(activation, arguments, begin, end, Gates{});
  });
}

Status gated_backward_with_output(const Elementwise<3, 3>& arguments, Activation activation,
                                  int64_t begin, int64_t end) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return elementwise_activated<T, GatedGradientAndValue>(activation, arguments, begin, end,
                                                           Gates{});
  });
}

}  // namespace TORCHKILN_ISA

TORCHKILN_CPU_ENTRY(gated,
                    (const Elementwise<2>& arguments, Activation activation, int64_t begin,
                     int64_t end),
                    (arguments, activation, begin, end))
TORCHKILN_CPU_ENTRY(gated_backward,
                    (const Elementwise<3, 2>& arguments, Activation activation, int64_t begin,
                     int64_t end),
                    (arguments, activation, begin, end))
TORCHKILN_CPU_ENTRY(gated_backward_with_output,
                    (const Elementwise<3, 3>& arguments, Activation activation, int64_t begin,
                     int64_t end),
                    (arguments, activation, begin, end))

}  // namespace torchkiln::cpu
