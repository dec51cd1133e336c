// An operator on tensors, and its gradients.

#include <torch/torch.h>

#include <iostream>

#include "torchkiln/torch/ops.h"

int main() {
  const at::Tensor x = torch::randn({17, 33}).requires_grad_();
  const at::Tensor bias = torch::randn({33}).requires_grad_();

  const at::Tensor out = torchkiln::bias_act(x, bias, {0.5});
  const auto grads = torch::autograd::grad({out.sum()}, {x, bias});

  const at::Tensor expected = torch::relu(x * 0.5 + bias);
  const auto expected_grads = torch::autograd::grad({expected.sum()}, {x, bias});
  const bool right = at::allclose(out, expected) && at::allclose(grads[0], expected_grads[0]) &&
                     at::allclose(grads[1], expected_grads[1]);
  std::cout << "first: output and gradients " << (right ? "right" : "wrong") << '\n';
  return right ? 0 : 1;
}
