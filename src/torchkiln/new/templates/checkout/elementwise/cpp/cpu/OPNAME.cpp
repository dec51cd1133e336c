#include "torchkiln/kernels/OPNAME.h"

#include "elementwise.h"
#include "isa.h"

namespace torchkiln::cpu {
namespace TORCHKILN_ISA {

Status OPNAME(const Elementwise<2>& arguments, double scale, int64_t begin, int64_t end) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    const OPNAME_parts::Formula<ExactMath, C> formula{static_cast<C>(scale)};
    return elementwise<T>(formula, arguments, begin, end);
  });
}

Status OPNAME_backward(const Elementwise<3, 2>& arguments, double scale, int64_t begin,
                       int64_t end) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    const OPNAME_parts::Gradients<ExactMath, C> gradients{static_cast<C>(scale)};
    return elementwise<T>(gradients, arguments, begin, end);
  });
}

}  // namespace TORCHKILN_ISA

#ifdef TORCHKILN_BASELINE

TORCHKILN_DECLARE_VARIANTS(OPNAME)
TORCHKILN_DECLARE_VARIANTS(OPNAME_backward)

Status OPNAME(const Elementwise<2>& arguments, double scale, int64_t begin, int64_t end) {
  return TORCHKILN_BEST_VARIANT(OPNAME)(arguments, scale, begin, end);
}

Status OPNAME_backward(const Elementwise<3, 2>& arguments, double scale, int64_t begin,
                       int64_t end) {
  return TORCHKILN_BEST_VARIANT(OPNAME_backward)(arguments, scale, begin, end);
}

#endif

}  // namespace torchkiln::cpu
