#include "torchkiln/kernels/pointwise.h"

#include "elementwise.h"
#include "isa.h"
#include "torchkiln/functors.h"

namespace torchkiln::cpu {
namespace TORCHKILN_ISA {

Status add(const Elementwise<2>& arguments, int64_t begin, int64_t end) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return elementwise<T>(Add{}, arguments, begin, end);
  });
}

}  // namespace TORCHKILN_ISA

#ifdef TORCHKILN_BASELINE

TORCHKILN_DECLARE_VARIANTS(add)

Status add(const Elementwise<2>& arguments, int64_t begin, int64_t end) {
  return TORCHKILN_BEST_VARIANT(add)(arguments, begin, end);
}

#endif

}  // namespace torchkiln::cpu
