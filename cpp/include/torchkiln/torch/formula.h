#pragma once

// The op of a formula (torchkiln/core/formula.h) on tensors of one shape and dtype, and numbers:
//
//     struct Op : FormulaOp<Op, formulas::Scale> {
//       static constexpr const char* kSchema = "mine::scale(Tensor x, float factor=2.0) -> Tensor";
//       static Tensor in_torch(const Tensor& x, double factor) { return x * factor; }
//     };
//     TORCH_LIBRARY_FRAGMENT(mine, m) { define<Op::Backward, Op>(m); }
//
// in_torch() is the formula with torch's ops, on tensors of the compute dtype: for vmap, torch.func
// and second derivatives.

#include <array>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "torchkiln/core/formula.h"
#include "torchkiln/torch/checks.h"
#include "torchkiln/torch/elementwise.h"
#include "torchkiln/torch/empty.h"
#include "torchkiln/torch/op.h"

namespace torchkiln {
namespace detail {

/// The type T. The index is ignored: Repeat<T, I>... lists T once per index I.
template <class T, size_t>
using Repeat = T;

/// The schema of the backward op: "mine::scale_backward(Tensor grad, Tensor x, float factor=2.0) ->
/// Tensor".
template <class Op, size_t Gradients>
constexpr auto kBackwardSchema = [] {
  std::array<char, 512> schema{};
  size_t at = 0;
  const auto append = [&](std::string_view text) {
    for (const char letter : text) schema[at++] = letter;
  };
  const std::string_view forward = Op::kSchema;
  const size_t name = forward.find('('), end = forward.rfind(" -> ");
  append(forward.substr(0, name));
  append("_backward(Tensor grad, ");
  append(forward.substr(name + 1, end - name - 1));
  append(Gradients == 1 ? " -> Tensor" : " -> (Tensor, Tensor)");
  return schema;
}();

/// Checks that all tensors have the device, dtype and shape of the first one. Reads their names
/// from the schema.
template <class Op>
void check_alike(std::initializer_list<std::reference_wrapper<const at::Tensor>> tensors) {
  static const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(
      std::string(Op::kSchema).substr(0, std::string_view(Op::kSchema).find('(')).c_str(), "");
  const std::vector<c10::Argument>& arguments = handle.schema().arguments();
  const at::Tensor& first = tensors.begin()->get();
  const char* const name_of_first = arguments[0].name().c_str();
  check_tensor(name_of_op<Op>(), name_of_first, first);
  check_dtype(name_of_op<Op>(), name_of_first, first);
  size_t index = 0;
  for (const at::Tensor& tensor : tensors) {
    const char* const name = arguments[index++].name().c_str();
    if (index > 1) check_like(name_of_op<Op>(), name, tensor, name_of_first, first);
  }
}

}  // namespace detail

template <class Op, class F, class Tensors = std::make_index_sequence<F::kTensors>,
          class Numbers = std::make_index_sequence<F::kNumbers>>
struct FormulaOp;

template <class Op, class F, size_t... T, size_t... N>
struct FormulaOp<Op, F, std::index_sequence<T...>, std::index_sequence<N...>> {
  /// The op for backward, which returns the gradient of each tensor.
  struct Backward {
    static constexpr const char* kSchema = detail::kBackwardSchema<Op, sizeof...(T)>.data();
    using Gradients = std::conditional_t<sizeof...(T) == 1, at::Tensor,
                                         std::tuple<detail::Repeat<at::Tensor, T>...>>;

    static Gradients meta(const at::Tensor& grad, detail::Repeat<const at::Tensor&, T>... tensors,
                          detail::Repeat<double, N>...) {
      detail::check_alike<Backward>({grad, tensors...});
      return {empty_contiguous(tensors)...};
    }

    static Gradients kernel(const at::Tensor& grad, detail::Repeat<const at::Tensor&, T>... tensors,
                            detail::Repeat<double, N>... values) {
      const Gradients gradients = meta(grad, tensors..., values...);
      std::array<at::Tensor, sizeof...(T)> outputs;
      if constexpr (sizeof...(T) == 1) {
        outputs = {gradients};
      } else {
        outputs = {std::get<T>(gradients)...};
      }
      const NumbersOf<F> numbers{values...};
      launch_elementwise(
          name_of_op<Backward>(), outputs, std::array{grad, tensors...},
          [&](const auto& p, auto stream) {
            return cuda::FormulaKernels<F>::gradients(p, numbers, stream);
          },
          [&](const auto& p, int64_t begin, int64_t end) {
            return cpu::FormulaKernels<F>::gradients(p, numbers, begin, end);
          });
      return gradients;
    }
  };
  using BackwardOp = Backward;

  static at::Tensor meta(detail::Repeat<const at::Tensor&, T>... tensors,
                         detail::Repeat<double, N>...) {
    detail::check_alike<Op>({tensors...});
    return empty_contiguous(first(tensors...));
  }

  static at::Tensor kernel(detail::Repeat<const at::Tensor&, T>... tensors,
                           detail::Repeat<double, N>... values) {
    const at::Tensor out = meta(tensors..., values...);
    const NumbersOf<F> numbers{values...};
    launch_elementwise(
        name_of_op<Op>(), std::array{out}, std::array{tensors...},
        [&](const auto& p, auto stream) {
          return cuda::FormulaKernels<F>::value(p, numbers, stream);
        },
        [&](const auto& p, int64_t begin, int64_t end) {
          return cpu::FormulaKernels<F>::value(p, numbers, begin, end);
        });
    return out;
  }

  static at::Tensor composite(detail::Repeat<const at::Tensor&, T>... tensors,
                              detail::Repeat<double, N>... values) {
    detail::check_alike<Op>({tensors...});
    const at::ScalarType dtype = first(tensors...).scalar_type();
    return Op::in_torch(tensors.to(compute_dtype(dtype))..., values...).to(dtype);
  }

 private:
  template <class... More>
  static const at::Tensor& first(const at::Tensor& tensor, const More&...) {
    return tensor;
  }
};

}  // namespace torchkiln
