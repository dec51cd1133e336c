// Aliases of a tensor for two uses. The node that made the tensor receives the gradients of both
// uses. The backward kernel of bn_act reads both, whereas autograd would add them in a pass of its
// own.

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>

#include "torchkiln/torch/autograd.h"
#include "torchkiln/torch/second_gradient.h"

namespace torchkiln {
namespace {

using torch::autograd::Node;

/// Whether, in this run, only the node's own function reads the gradient of its output.
bool is_private(Node& node) {
  const auto* const executed = torch::autograd::get_current_graph_task_exec_info();
  const bool runs_all = executed == nullptr || executed->empty();  // not torch.autograd.grad()
  return runs_all && node.pre_hooks().empty() && node.tensor_pre_hooks().empty() &&
         node.retains_grad_hooks().empty() && node.post_hooks().empty();
}

class TwoUses final : public Node {
 public:
  explicit TwoUses(torch::autograd::edge_list&& edges) : Node(std::move(edges)) {}

  std::string name() const override { return "two_uses_backward"; }

  variable_list apply(variable_list&& grads) override {
    const at::Tensor &one = grads[0], &other = grads[1];
    if (!one.defined() || !other.defined()) return {one.defined() ? one : other};
    Node* const maker = next_edge(0).function.get();
    auto* const takes = dynamic_cast<OpNodeBase*>(maker);
    const bool plain =
        one.key_set() == other.key_set() && !Incoming(grads, *this).needs_composite();
    const bool alike = one.scalar_type() == other.scalar_type() && stream() == maker->stream();
    const bool takes_it = takes != nullptr && plain && alike && is_private(*maker) &&
                          takes->second->put(other, torch::autograd::get_current_graph_task_id());
    return {takes_it ? one : one + other};
  }
};

}  // namespace

std::tuple<at::Tensor, at::Tensor> two_uses(const at::Tensor& x) {
  const auto maker = x.grad_fn();
  const auto* const takes = dynamic_cast<OpNodeBase*>(maker.get());
  if (!at::GradMode::is_enabled() || takes == nullptr || takes->second == nullptr || x.is_view() ||
      is_transformed(x))
    return {x, x};
  const auto node = detail::make_node<TwoUses>(
      torch::autograd::edge_list{torch::autograd::impl::gradient_edge(x)});
  std::tuple<at::Tensor, at::Tensor> uses{x.detach(), x.detach()};
  detail::for_each_output(uses, [&](const at::Tensor& use) {
    torch::autograd::set_history(use, detail::NodePointer(node));
  });
  return uses;
}

}  // namespace torchkiln
