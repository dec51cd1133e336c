#pragma once

// The CPU kernels of a formula, in the namespace of an instruction set.

#include "torchkiln/core/formula.h"
#include "torchkiln/cpu/elementwise.h"
#include "torchkiln/cpu/isa.h"

namespace torchkiln::cpu::TORCHKILN_ISA {

/// Computes Functor<F, ExactMath, C>, where Functor is FormulaValue or FormulaGradients.
template <template <class...> class Functor, class F, class Arguments>
Status run_formula(const Arguments& arguments, const NumbersOf<F>& numbers, int64_t begin,
                   int64_t end) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Functor<F, ExactMath, Compute<T>> functor(numbers);
    return elementwise<T>(functor, arguments, begin, end);
  });
}

}  // namespace torchkiln::cpu::TORCHKILN_ISA
