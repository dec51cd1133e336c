#include "torchkiln/kernels/muladd.h"

#include "elementwise.h"
#include "isa.h"

namespace torchkiln::cpu {
namespace TORCHKILN_ISA {

Status multiply_add(const Elementwise<3>& arguments, int64_t begin, int64_t end) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return elementwise<T>(MultiplyAdd{}, arguments, begin, end);
  });
}

Status scale_add(const Elementwise<2>& arguments, double factor, int64_t begin, int64_t end) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    return elementwise<T>(ScaleAdd<C>{static_cast<C>(factor)}, arguments, begin, end);
  });
}

Status multiply_shift(const Elementwise<2>& arguments, double shift, int64_t begin, int64_t end) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    return elementwise<T>(MultiplyShift<C>{static_cast<C>(shift)}, arguments, begin, end);
  });
}

Status scale_shift(const Elementwise<1>& arguments, double factor, double shift, int64_t begin,
                   int64_t end) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    const ScaleShift<C> functor{static_cast<C>(factor), static_cast<C>(shift)};
    return elementwise<T>(functor, arguments, begin, end);
  });
}

Status multiply_gradient(const Elementwise<3, 2>& arguments, int64_t begin, int64_t end) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return elementwise<T>(MultiplyGradient{}, arguments, begin, end);
  });
}

}  // namespace TORCHKILN_ISA

#ifdef TORCHKILN_BASELINE

TORCHKILN_DECLARE_VARIANTS(multiply_add)
TORCHKILN_DECLARE_VARIANTS(scale_add)
TORCHKILN_DECLARE_VARIANTS(multiply_shift)
TORCHKILN_DECLARE_VARIANTS(scale_shift)
TORCHKILN_DECLARE_VARIANTS(multiply_gradient)

Status multiply_add(const Elementwise<3>& arguments, int64_t begin, int64_t end) {
  return TORCHKILN_BEST_VARIANT(multiply_add)(arguments, begin, end);
}

Status scale_add(const Elementwise<2>& arguments, double factor, int64_t begin, int64_t end) {
  return TORCHKILN_BEST_VARIANT(scale_add)(arguments, factor, begin, end);
}

Status multiply_shift(const Elementwise<2>& arguments, double shift, int64_t begin, int64_t end) {
  return TORCHKILN_BEST_VARIANT(multiply_shift)(arguments, shift, begin, end);
}

Status scale_shift(const Elementwise<1>& arguments, double factor, double shift, int64_t begin,
                   int64_t end) {
  return TORCHKILN_BEST_VARIANT(scale_shift)(arguments, factor, shift, begin, end);
}

Status multiply_gradient(const Elementwise<3, 2>& arguments, int64_t begin, int64_t end) {
  return TORCHKILN_BEST_VARIANT(multiply_gradient)(arguments, begin, end);
}

#endif

}  // namespace torchkiln::cpu
