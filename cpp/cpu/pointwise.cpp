#include "torchkiln/kernels/pointwise.h"

#include "detail/transpose.h"
#include "torchkiln/cpu/elementwise.h"
#include "torchkiln/cpu/isa.h"

namespace torchkiln::cpu {
namespace TORCHKILN_ISA {

Status add(const Elementwise<2>& arguments, int64_t begin, int64_t end) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return elementwise<T>(Add{}, arguments, begin, end);
  });
}

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

Status scale_by(const Elementwise<1>& arguments, const void* factor, const void* divisor,
                int64_t begin, int64_t end) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    const C scale =
        ScaleBy<C>{static_cast<const C*>(factor), static_cast<const C*>(divisor)}.scale();
    return elementwise<T>(ScaleBy<C>{&scale, nullptr}, arguments, begin, end);
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

Status transpose(const Transpose& arguments, int64_t begin, int64_t end) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    constexpr size_t kBytes = sizeof(typename decltype(tag)::type);
    using U = std::conditional_t<kBytes == 2, uint16_t,
                                 std::conditional_t<kBytes == 4, uint32_t, uint64_t>>;
    transpose_tiles<U>(arguments, begin, end);
    return Status{};
  });
}

}  // namespace TORCHKILN_ISA

TORCHKILN_CPU_ENTRY(add, (const Elementwise<2>& arguments, int64_t begin, int64_t end),
                    (arguments, begin, end))
TORCHKILN_CPU_ENTRY(multiply_add, (const Elementwise<3>& arguments, int64_t begin, int64_t end),
                    (arguments, begin, end))
TORCHKILN_CPU_ENTRY(scale_add,
                    (const Elementwise<2>& arguments, double factor, int64_t begin, int64_t end),
                    (arguments, factor, begin, end))
TORCHKILN_CPU_ENTRY(multiply_shift,
                    (const Elementwise<2>& arguments, double shift, int64_t begin, int64_t end),
                    (arguments, shift, begin, end))
TORCHKILN_CPU_ENTRY(scale_by,
                    (const Elementwise<1>& arguments, const void* factor, const void* divisor,
                     int64_t begin, int64_t end),
                    (arguments, factor, divisor, begin, end))
TORCHKILN_CPU_ENTRY(scale_shift,
                    (const Elementwise<1>& arguments, double factor, double shift, int64_t begin,
                     int64_t end),
                    (arguments, factor, shift, begin, end))
TORCHKILN_CPU_ENTRY(multiply_gradient,
                    (const Elementwise<3, 2>& arguments, int64_t begin, int64_t end),
                    (arguments, begin, end))
TORCHKILN_CPU_ENTRY(transpose, (const Transpose& arguments, int64_t begin, int64_t end),
                    (arguments, begin, end))

}  // namespace torchkiln::cpu
