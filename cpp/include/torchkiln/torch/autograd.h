#pragma once

// Records a call in the autograd graph. The op lists the tensors that backward needs and gives a
// function that computes the gradients; both become typed members of the graph's node.
//
//     Tensor y = ...;  // computed below autograd
//     return record("softmax", {x}, y, keep(y), [=](const Incoming& in, const Kept<1>& kept) {
//       return variable_list{softmax_backward(in[0], kept[0], dim)};
//     });

#include <ATen/ATen.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/version.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "torchkiln/torch/second_gradient.h"

namespace torchkiln {

using torch::autograd::variable_list;
using MaybeTensor = std::optional<at::Tensor>;

/// Converts an optional tensor to autograd's form, in which an argument that was left out is an
/// undefined tensor, and back.
inline at::Tensor tensor_or_undefined(const MaybeTensor& tensor) {
  return tensor.value_or(at::Tensor());
}
inline MaybeTensor maybe(const at::Tensor& tensor) {
  return tensor.defined() ? MaybeTensor(tensor) : std::nullopt;
}

/// Whether a functorch transform (grad, jvp, vmap ...) is running, or an input has a tangent of
/// forward-mode differentiation. Recorded nodes support neither, so the op runs its composite.
template <class... Tensors>
bool is_transformed(const Tensors&... tensors) {
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerBackMode) ||
         ((tensors.defined() && tensors._fw_grad(/*level=*/0).defined()) || ...);
}

/// The arguments of a node's backward: the gradients of the outputs, and the inputs whose gradients
/// are wanted.
class Incoming {
 public:
  Incoming(const variable_list& grads, const torch::autograd::Node& node, at::Tensor second = {})
      : grads_(grads), node_(node), second_(std::move(second)) {}

  /// The gradient of an output; undefined if the output was not used.
  const at::Tensor& operator[](size_t output) const { return grads_[output]; }
  const variable_list& all() const { return grads_; }

  /// A second gradient of the first output. The op must add it to operator[](0). Undefined if there
  /// is none. Only ops that have called accept_second_gradient() receive one.
  const at::Tensor& second() const { return second_; }

  /// Whether the gradient of an input is needed. Inputs are numbered as record() received them.
  bool wants(size_t input) const { return node_.task_should_compute_output(input); }

  /// Whether the gradients must be computed with torch's own ops, because they are differentiated
  /// again (create_graph=True) or vmapped (is_grads_batched=True).
  bool needs_composite() const {
    using Key = c10::DispatchKey;
    if (at::GradMode::is_enabled()) return true;
    for (const at::Tensor& grad : grads_) {
      constexpr c10::DispatchKeySet kBatched({Key::FuncTorchBatched, Key::Batched});
      if (grad.defined() && grad.key_set().has_any(kBatched)) return true;
    }
    return false;
  }

  /// The edge of the graph to an input.
  const torch::autograd::Edge& edge(size_t input) const { return node_.next_edge(input); }

 private:
  const variable_list& grads_;
  const torch::autograd::Node& node_;
  at::Tensor second_;
};

/// The tensors saved for backward, in the order of keep().
template <size_t N>
using Kept = std::array<at::Tensor, N>;

template <class... Tensors>
Kept<sizeof...(Tensors)> keep(const Tensors&... tensors) {
  return {tensors...};
}

namespace detail {

using NodePointer = decltype(torch::autograd::Edge::function);

/// Makes a node. From torch 2.13 on, nodes have intrusive reference counts.
template <class Node, class... Arguments>
auto make_node(Arguments&&... arguments) {
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13
  return std::shared_ptr<Node>(new Node(std::forward<Arguments>(arguments)...),
                               torch::autograd::deleteNode);
#else
  return c10::make_intrusive<Node>(std::forward<Arguments>(arguments)...);
#endif
}

template <size_t N, class Gradients>
class OpNode final : public OpNodeBase {
 public:
  OpNode(const char* name, torch::autograd::edge_list&& edges, Gradients gradients)
      : OpNodeBase(std::move(edges)), name_(name), gradients_(std::move(gradients)) {}

  void save(size_t index, torch::autograd::SavedVariable&& tensor) {
    saved_[index] = std::move(tensor);
  }

  std::string name() const override { return std::string(name_) + "_backward"; }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    bool any_defined = false;
    for (const at::Tensor& grad : grads) any_defined = any_defined || grad.defined();
    if (!any_defined) return variable_list(num_outputs());
    Kept<N> kept;
    for (size_t i = 0; i < N; ++i) kept[i] = saved_[i].unpack(getptr());
    const int run = second == nullptr ? 0 : torch::autograd::get_current_graph_task_id();
    variable_list found = gradients_(
        Incoming(grads, *this, second == nullptr ? at::Tensor() : second->take(run)), kept);
    for (size_t i = 0; i < found.size(); ++i)
      if (found[i].defined() && !task_should_compute_output(i)) found[i].reset();
    return found;
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& tensor : saved_) tensor.reset_data();
  }

 private:
  const char* name_;
  Gradients gradients_;
  std::array<torch::autograd::SavedVariable, N> saved_;
};

template <class Outputs, class Each>
void for_each_output(Outputs& outputs, const Each& each) {
  if constexpr (std::is_same_v<std::decay_t<Outputs>, at::Tensor>) {
    each(outputs);
  } else {
    std::apply([&](auto&... output) { (each(output), ...); }, outputs);
  }
}

inline torch::autograd::edge_list edges_to(std::initializer_list<at::Tensor> inputs) {
  torch::autograd::edge_list edges;
  edges.reserve(inputs.size());
  for (const at::Tensor& input : inputs) {
    edges.push_back(input.defined() && input.requires_grad()
                        ? torch::autograd::impl::gradient_edge(input)
                        : torch::autograd::Edge());
  }
  return edges;
}

}  // namespace detail

/// Connects `outputs`, a tensor or a tuple of tensors, to `inputs` in the autograd graph. `name` is
/// the name of the op. An undefined input is an optional argument that was left out.
/// gradients(incoming, kept) returns one gradient per input, in order; those of inputs that
/// need none may be any tensor. `kept` may contain inputs and outputs. Returns `outputs` unrecorded
/// if none of `inputs` requires a gradient (only another argument did).
template <class Outputs, size_t N, class Gradients>
Outputs record(const char* name, std::initializer_list<at::Tensor> inputs, Outputs outputs,
               const Kept<N>& kept, Gradients gradients) {
  const auto requires_grad = [](const at::Tensor& input) {
    return input.defined() && input.requires_grad();
  };
  if (std::none_of(inputs.begin(), inputs.end(), requires_grad)) return outputs;
  const auto node = detail::make_node<detail::OpNode<N, Gradients>>(name, detail::edges_to(inputs),
                                                                    std::move(gradients));
  detail::for_each_output(outputs, [&](const at::Tensor& output) {
    torch::autograd::set_history(output, detail::NodePointer(node));
  });
  for (size_t i = 0; i < N; ++i) {
    bool is_output = false;
    detail::for_each_output(outputs, [&](const at::Tensor& output) {
      is_output = is_output || output.is_same(kept[i]);
    });
    if (kept[i].defined()) node->save(i, torch::autograd::SavedVariable(kept[i], is_output));
  }
  return outputs;
}

/// record() for an op that works in place. Call it after the op has changed `x`. `before`: the
/// graph edge of x before the change.
template <class Gradients>
void record_in_place(const char* name, const at::Tensor& x, const torch::autograd::Edge& before,
                     const at::Tensor& kept, Gradients gradients) {
  const auto node = detail::make_node<detail::OpNode<1, Gradients>>(
      name, torch::autograd::edge_list{before}, std::move(gradients));
  torch::autograd::rebase_history(x, detail::NodePointer(node));
  const bool is_output = kept.is_same(x);
  node->save(0, torch::autograd::SavedVariable(kept, is_output, is_output && x.is_view()));
}

/// Gives `tensor`, a new tensor of an input's shape, the graph edge of that input. Second
/// derivatives of `tensor` then flow to the input, which therefore need not be saved.
inline void stand_in_for(const Incoming& in, size_t input, const at::Tensor& tensor) {
  if (in.edge(input).is_valid()) torch::autograd::impl::set_gradient_edge(tensor, in.edge(input));
}

/// The gradients of the wanted inputs, computed by differentiating composite(inputs), which is the
/// op with torch's own ops. They can be differentiated again. composite() returns a tensor or a
/// tuple.
template <size_t N, class Composite>
variable_list composite_gradients(const Incoming& in, std::array<at::Tensor, N> inputs,
                                  const std::array<bool, N>& wanted, const Composite& composite) {
  const bool again = at::GradMode::is_enabled();
  const at::AutoGradMode recorded(true);
  variable_list leaves, outputs, grads;
  for (size_t i = 0; i < N; ++i) {
    if (!inputs[i].defined() || !wanted[i]) continue;
    inputs[i] = inputs[i].requires_grad() ? inputs[i].view_as(inputs[i])
                                          : inputs[i].detach().requires_grad_();
    leaves.push_back(inputs[i]);
  }
  auto results = composite(inputs);
  size_t output = 0;
  detail::for_each_output(results, [&](const at::Tensor& result) {
    if (in[output].defined() && result.requires_grad()) {
      outputs.push_back(result);
      grads.push_back(in[output]);
    }
    ++output;
  });
  const variable_list found = torch::autograd::grad(outputs, leaves, grads, /*retain_graph=*/true,
                                                    /*create_graph=*/again, /*allow_unused=*/true);
  variable_list gradients(N);
  size_t next = 0;
  for (size_t i = 0; i < N; ++i)
    if (inputs[i].defined() && wanted[i]) gradients[i] = found[next++];
  return gradients;
}

/// Computes the gradients that backward wants. `inputs` must be the first inputs of record(), in
/// the same order.
template <size_t N, class Composite>
variable_list composite_gradients(const Incoming& in, const std::array<at::Tensor, N>& inputs,
                                  const Composite& composite) {
  std::array<bool, N> wanted;
  for (size_t i = 0; i < N; ++i) wanted[i] = in.wants(i);
  return composite_gradients(in, inputs, wanted, composite);
}

}  // namespace torchkiln
