#pragma once

// Sums of two gradients inside a kernel of backward.
//
// If a tensor is used twice, autograd adds the gradients of both uses before the node that made the
// tensor runs: two reads and a write of memory. two_uses() makes an alias for each use. In
// backward, the node of the aliases passes on one gradient and hands over the other, and the node
// that made the tensor adds them where it reads them. Only a node for which
// accept_second_gradient() was called gets two gradients, and only if nothing else could see its
// incomplete gradient: no hooks on that node, no torch.autograd.grad() and backward(inputs=...), no
// second derivatives, one stream.

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

#include "torchkiln/core/status.h"

namespace torchkiln {

/// Second gradients on the way from one node to another: at most one for each run of backward. Runs
/// may be nested, and threads may share a graph.
class SecondGradient {
 public:
  /// Returns false, and does not store the gradient, if this run already has one.
  bool put(const at::Tensor& grad, int run) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (find(run) != pending_.end()) return false;
    pending_.emplace_back(run, grad);
    return true;
  }

  /// Returns and removes the gradient of this run; undefined if there is none.
  at::Tensor take(int run) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = find(run);
    if (found == pending_.end()) return {};
    at::Tensor grad = std::move(found->second);
    pending_.erase(found);
    return grad;
  }

 private:
  using Pending = std::vector<std::pair<int, at::Tensor>>;

  Pending::iterator find(int run) {
    return std::find_if(pending_.begin(), pending_.end(),
                        [&](const auto& each) { return each.first == run; });
  }

  std::mutex mutex_;
  Pending pending_;
};

/// The base of all nodes of ops.
class OpNodeBase : public torch::autograd::Node {
 public:
  using Node::Node;

  /// Null, unless the op itself adds a second gradient of its first output.
  std::unique_ptr<SecondGradient> second;
};

/// Lets the node of an output, if it has one, accept a second gradient: see Incoming::second().
inline void accept_second_gradient(const at::Tensor& output) {
  if (auto* const node = dynamic_cast<OpNodeBase*>(output.grad_fn().get()))
    node->second = std::make_unique<SecondGradient>();
}

/// Two tensors for two uses of x: aliases of x if its node accepts a second gradient, else x
/// itself.
TORCHKILN_EXPORT std::tuple<at::Tensor, at::Tensor> two_uses(const at::Tensor& x);

}  // namespace torchkiln
