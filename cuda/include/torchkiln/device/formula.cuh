#pragma once

// The CUDA kernels of a formula. The build instantiates cuda::FormulaKernels for each formula.

#include "torchkiln/core/formula.h"
#include "torchkiln/device/elementwise.cuh"

namespace torchkiln {
namespace device {

/// Launches Functor<F, Math, C> on inputs of one dtype; Functor is FormulaValue or
/// FormulaGradients.
template <template <class...> class Functor, class F, int Outputs, int Inputs, size_t... I>
Status launch_formula(const Elementwise<Inputs, Outputs>& arguments, const NumbersOf<F>& numbers,
                      CUstream_st* stream, std::index_sequence<I...>) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Functor<F, MathFor<T>, Compute<T>> functor(numbers);
    return elementwise::launch<T, std::enable_if_t<(I < Inputs), T>...>(functor, arguments, stream);
  });
}

}  // namespace device

namespace cuda {

template <class F>
Status FormulaKernels<F>::value(const Elementwise<F::kTensors>& arguments,
                                const NumbersOf<F>& numbers, CUstream_st* stream) {
  return device::launch_formula<FormulaValue, F>(arguments, numbers, stream,
                                                 std::make_index_sequence<F::kTensors>{});
}

template <class F>
Status FormulaKernels<F>::gradients(const Elementwise<F::kTensors + 1, F::kTensors>& arguments,
                                    const NumbersOf<F>& numbers, CUstream_st* stream) {
  return device::launch_formula<FormulaGradients, F>(arguments, numbers, stream,
                                                     std::make_index_sequence<F::kTensors + 1>{});
}

}  // namespace cuda
}  // namespace torchkiln
