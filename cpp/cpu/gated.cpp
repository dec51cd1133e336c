#include "torchkiln/kernels/gated.h"

#include "elementwise.h"
#include "isa.h"

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

}  // namespace TORCHKILN_ISA

#ifdef TORCHKILN_BASELINE

TORCHKILN_DECLARE_VARIANTS(gated)
TORCHKILN_DECLARE_VARIANTS(gated_backward)

Status gated(const Elementwise<2>& arguments, Activation activation, int64_t begin, int64_t end) {
  return TORCHKILN_BEST_VARIANT(gated)(arguments, activation, begin, end);
}

Status gated_backward(const Elementwise<3, 2>& arguments, Activation activation, int64_t begin,
                      int64_t end) {
  return TORCHKILN_BEST_VARIANT(gated_backward)(arguments, activation, begin, end);
}

#endif

}  // namespace torchkiln::cpu
