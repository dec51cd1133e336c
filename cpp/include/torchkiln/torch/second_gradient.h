#pragma once

// Sums of two gradients inside a kernel of backward.
//
// If a tensor is used twice, autograd adds the gradients of both uses before the node that made the
// tensor runs: two reads and a write of memory. two_uses() makes an alias for each use. In
// backward, the node of the aliases passes on one gradient and hands over the other, and the node
// that made the tensor adds them where it reads them. Only a node that asked for it, by
// accept_second_gradient(), gets two; and only if nobody else could see that its gradient is not
// complete: no hooks, no torch.autograd.grad(), no second derivatives, one stream.

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <mutex>
#include <tuple>
#include <utility>

#include "torchkiln/core/status.h"

namespace torchkiln {

/// A gradient on its way from one node to another, of one run of backward.
class SecondGradient {
 public:
  void put(at::Tensor grad, int run) {
    const std::lock_guard<std::mutex> lock(mutex_);
    grad_ = std::move(grad);
    run_ = run;
  }

  /// The gradient of this run; undefined if there is none.
  at::Tensor take(int run) {
    const std::lock_guard<std::mutex> lock(mutex_);
    at::Tensor taken = run_ == run ? std::move(grad_) : at::Tensor();
    grad_.reset();
    return taken;
  }

 private:
  std::mutex mutex_;
  at::Tensor grad_;
  int run_ = -1;
};

/// The base of all nodes of ops.
class OpNodeBase : public torch::autograd::Node {
 public:
  using Node::Node;

  /// Null unless the op adds a second gradient of its first output itself.
  std::unique_ptr<SecondGradient> second;
};

/// Lets the node of an output, if it has one, take a second gradient: see Incoming::second().
inline void accept_second_gradient(const at::Tensor& output) {
  if (auto* const node = dynamic_cast<OpNodeBase*>(output.grad_fn().get()))
    node->second = std::make_unique<SecondGradient>();
}

/// x for each of two uses: aliases of it if its node takes a second gradient, else x itself.
TORCHKILN_EXPORT std::tuple<at::Tensor, at::Tensor> two_uses(const at::Tensor& x);

}  // namespace torchkiln
