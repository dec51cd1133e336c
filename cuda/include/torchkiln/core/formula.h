#pragma once

// An elementwise op from one struct, its formula:
//
//     struct TORCHKILN_VISIBLE Scale : Formula</*tensors*/ 1, /*numbers*/ 1> {
//       static constexpr const char* kName = "scale";
//       template <class Math, class C>
//       TORCHKILN_FUNCTION static C value(C x, C factor) { return x * factor; }
//       template <class Math, class C>
//       TORCHKILN_FUNCTION static C gradients(C grad, C x, C factor) { return grad * factor; }
//     };
//
// The build compiles its kernels for the CPU (torchkiln/cpu/formula.h) and for the GPU
// (torchkiln/device/formula.cuh); torchkiln/torch/formula.h makes the op.

#include <array>
#include <utility>

#include "torchkiln/core/functors.h"
#include "torchkiln/core/layout.h"

struct CUstream_st;

namespace torchkiln {

/// Base of a formula on tensors of one shape and dtype, and on numbers. gradients() returns one
/// value for one tensor, a Pair for two.
template <int Tensors, int Numbers = 0>
struct Formula {
  static_assert(Tensors == 1 || Tensors == 2, "kernels write the gradients of 1 or 2 tensors");
  static constexpr int kTensors = Tensors;
  static constexpr int kNumbers = Numbers;
};

template <class F>
using NumbersOf = std::array<double, F::kNumbers>;

/// Base of the functors of a formula: holds the numbers in the compute type.
template <class F, class C>
struct FormulaNumbers {
  C numbers[F::kNumbers > 0 ? F::kNumbers : 1];

  explicit FormulaNumbers(const NumbersOf<F>& values) : numbers{} {
    for (int i = 0; i < F::kNumbers; ++i) numbers[i] = static_cast<C>(values[i]);
  }
};

template <class F, class Math, class C, class = std::make_index_sequence<F::kNumbers>>
struct FormulaValue;
template <class F, class Math, class C, size_t... I>
struct FormulaValue<F, Math, C, std::index_sequence<I...>> : FormulaNumbers<F, C> {
  using FormulaNumbers<F, C>::FormulaNumbers;

  template <class... Inputs>
  TORCHKILN_FUNCTION C operator()(Inputs... inputs) const {
    return F::template value<Math>(inputs..., this->numbers[I]...);
  }
};

template <class F, class Math, class C, class = std::make_index_sequence<F::kNumbers>>
struct FormulaGradients;
template <class F, class Math, class C, size_t... I>
struct FormulaGradients<F, Math, C, std::index_sequence<I...>> : FormulaNumbers<F, C> {
  using FormulaNumbers<F, C>::FormulaNumbers;

  template <class... Inputs>
  TORCHKILN_FUNCTION auto operator()(C grad, Inputs... inputs) const {
    return F::template gradients<Math>(grad, inputs..., this->numbers[I]...);
  }
};

namespace cpu {

/// The kernels of a formula: they compute the elements begin <= i < end. The inputs of gradients()
/// are the incoming gradient, then the tensors.
template <class F>
struct TORCHKILN_EXPORT FormulaKernels {
  static Status value(const Elementwise<F::kTensors>& arguments, const NumbersOf<F>& numbers,
                      int64_t begin, int64_t end);
  static Status gradients(const Elementwise<F::kTensors + 1, F::kTensors>& arguments,
                          const NumbersOf<F>& numbers, int64_t begin, int64_t end);
};

}  // namespace cpu

namespace cuda {

/// The functions of namespace cpu on the current device, for all elements, queued on `stream`.
template <class F>
struct TORCHKILN_EXPORT FormulaKernels {
  static Status value(const Elementwise<F::kTensors>& arguments, const NumbersOf<F>& numbers,
                      CUstream_st* stream);
  static Status gradients(const Elementwise<F::kTensors + 1, F::kTensors>& arguments,
                          const NumbersOf<F>& numbers, CUstream_st* stream);
};

}  // namespace cuda
}  // namespace torchkiln
