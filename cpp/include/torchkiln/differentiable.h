#pragma once

// Derivatives of an operator with a backward of its own: of both orders, forward mode, and under
// the transforms of torch.func. For an operator on tensors and numbers that returns one tensor:
//
//     struct Op {
//       static constexpr const char* kName = "mine::op";
//       static constexpr const char* kBackward = "mine::op_backward";
//       static Tensor composite(const Tensor& x, const Tensor& gate, double scale);
//     };
//     TORCH_LIBRARY_IMPL(mine, Autograd, m) { m.impl("op", TORCH_FN(Differentiable<Op>::call)); }
//
// Registered are op(Tensor x, Tensor gate, float scale) -> Tensor and, with the same arguments
// after the incoming gradient, op_backward(Tensor grad, ...) -> Tensor[], a gradient for each
// tensor. composite() checks, too, and computes the same in torch's own ops: transforms and the
// derivative of the derivative are taken of it.

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <array>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "torchkiln/autograd.h"

namespace torchkiln {

template <class Op, class Composite = decltype(&Op::composite)>
struct Differentiable;

template <class Op, class... Args>
struct Differentiable<Op, at::Tensor (*)(Args...)> {
  using Tensor = at::Tensor;
  using Context = torch::autograd::AutogradContext;
  using Values = std::tuple<std::decay_t<Args>...>;
  using Each = std::index_sequence_for<Args...>;

  /// The function for the key Autograd.
  static Tensor call(c10::DispatchKeySet keys, Args... args) {
    const std::vector<Tensor> inputs = tensors(Values(args...));
    bool transformed = is_transformed(), all_defined = true, any_requires_grad = false;
    for (const Tensor& input : inputs) {
      all_defined = all_defined && input.defined();
      if (!input.defined()) continue;
      transformed = transformed || is_transformed(input);
      any_requires_grad = any_requires_grad || input.requires_grad();
    }
    if (transformed) return Op::composite(args...);
    if (all_defined && any_requires_grad && at::GradMode::is_enabled())
      return Function::apply(args...);
    const at::AutoDispatchBelowADInplaceOrView below;
    return op().redispatch(keys & c10::after_autograd_keyset, args...);
  }

 private:
  template <class T>
  static constexpr bool kIsTensor = std::is_same_v<std::decay_t<T>, Tensor>;

  static const auto& op() {
    static const auto found = find_op<Tensor(Args...)>(Op::kName);
    return found;
  }
  static const auto& backward_op() {
    static const auto found = find_op<std::vector<Tensor>(const Tensor&, Args...)>(Op::kBackward);
    return found;
  }

  static std::vector<Tensor> tensors(const Values& values) {
    std::vector<Tensor> found;
    const auto take = [&](const auto& value) {
      if constexpr (kIsTensor<decltype(value)>) found.push_back(value);
    };
    std::apply([&](const auto&... each) { (take(each), ...); }, values);
    return found;
  }

  /// `values` with other tensors in the places of theirs.
  static Values with_tensors(Values values, const std::vector<Tensor>& tensors) {
    size_t next = 0;
    const auto put = [&](auto& value) {
      if constexpr (kIsTensor<decltype(value)>) value = tensors[next++];
    };
    std::apply([&](auto&... each) { (put(each), ...); }, values);
    return values;
  }

  template <size_t... K>
  static void save_numbers(Context* context, const Values& values, std::index_sequence<K...>) {
    const auto save = [&](const char* name, const auto& value) {
      if constexpr (!kIsTensor<decltype(value)>) context->saved_data[name] = value;
    };
    (save(std::to_string(K).c_str(), std::get<K>(values)), ...);
  }

  template <size_t... K>
  static Values saved(Context* context, std::index_sequence<K...>) {
    Values values;
    const auto restore = [&](const char* name, auto& value) {
      using T = std::decay_t<decltype(value)>;
      if constexpr (!kIsTensor<T>) value = context->saved_data[name].template to<T>();
    };
    (restore(std::to_string(K).c_str(), std::get<K>(values)), ...);
    return with_tensors(values, context->get_saved_variables());
  }

  /// The gradients by torch's own differentiation of composite(), which can be differentiated
  /// again.
  static std::vector<Tensor> by_composite(const Tensor& grad, Values values) {
    const bool again = at::GradMode::is_enabled();
    const at::AutoGradMode recorded(true);
    std::vector<Tensor> inputs = tensors(values), leaves;
    for (Tensor& input : inputs) {
      if (!input.requires_grad()) continue;
      input = input.view_as(input);
      leaves.push_back(input);
    }
    const Tensor out = std::apply(Op::composite, with_tensors(std::move(values), inputs));
    const auto found = torch::autograd::grad({out}, leaves, {grad}, /*retain_graph=*/true,
                                             /*create_graph=*/again, /*allow_unused=*/true);
    size_t next = 0;
    for (Tensor& input : inputs) input = input.requires_grad() ? found[next++] : Tensor();
    return inputs;
  }

  struct Function : torch::autograd::Function<Function> {
    static Tensor forward(Context* context, Args... args) {
      const at::AutoDispatchBelowADInplaceOrView below;
      const Values values(args...);
      save_numbers(context, values, Each{});
      context->save_for_backward(tensors(values));
      return op().call(args...);
    }

    static torch::autograd::variable_list backward(Context* context,
                                                   const torch::autograd::variable_list& grads) {
      const Tensor& grad = grads[0];
      const Values values = saved(context, Each{});
      // Many gradients at once, as torch.autograd.functional asks for them.
      const c10::DispatchKeySet batched(
          {c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::Batched});
      std::vector<Tensor> found;
      if (at::GradMode::is_enabled() || grad.key_set().has_any(batched)) {
        found = by_composite(grad, values);
      } else {
        found = std::apply([&](const auto&... each) { return backward_op().call(grad, each...); },
                           values);
      }
      torch::autograd::variable_list results;
      size_t next = 0;
      ((results.push_back(kIsTensor<Args> ? found[next++] : Tensor())), ...);
      return results;
    }
  };
};

}  // namespace torchkiln
