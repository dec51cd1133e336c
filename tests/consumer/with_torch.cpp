// torchkiln::torchkiln: the operators on tensors, gradients included.

#include <torch/torch.h>

#include <cstdio>

#include "torchkiln/torch/ops.h"

namespace {

bool close(const char* what, const at::Tensor& found, const at::Tensor& expected) {
  const bool same = at::allclose(found, expected, 1e-6, 1e-6);
  if (!same) std::fprintf(stderr, "with_torch: %s differs\n", what);
  return same;
}

}  // namespace

int main() {
  torch::manual_seed(2026);
  const at::Tensor x = torch::randn({17, 33}).requires_grad_();
  const at::Tensor bias = torch::randn({33}).requires_grad_();
  const at::Tensor grad = torch::randn({17, 33});

  const at::Tensor out = torchkiln::scale_bias_relu(x, bias, 0.5);
  const at::Tensor expected = torch::relu(x * 0.5 + bias);
  const auto grads = torch::autograd::grad({out}, {x, bias}, {grad});
  const auto expected_grads = torch::autograd::grad({expected}, {x, bias}, {grad});

  const bool right = close("output", out, expected) &&
                     close("gradient of x", grads[0], expected_grads[0]) &&
                     close("gradient of bias", grads[1], expected_grads[1]) &&
                     close("sum", torchkiln::add(x, bias), x + bias);
  if (right) std::printf("with_torch: torch %s, output and gradients right\n", TORCH_VERSION);
  return right ? 0 : 1;
}
