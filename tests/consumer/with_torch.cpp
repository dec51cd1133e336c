// torchkiln::torch: the operators on tensors, gradients included, and their C functions.

#include <torch/torch.h>

#include <cstdio>
#include <string>

#include "torchkiln/torch/c_function.h"
#include "torchkiln/torch/ops.h"

namespace {

bool close(const char* what, const at::Tensor& found, const at::Tensor& expected) {
  const bool same = at::allclose(found, expected, 1e-6, 1e-6);
  if (!same) std::fprintf(stderr, "with_torch: %s differs\n", what);
  return same;
}

at::Tensor relu_in_c(at::Tensor& x) {
  using Function = AOTITorchError (*)(AtenTensorHandle, AtenTensorHandle*);
  const auto relu =
      reinterpret_cast<Function>(torchkiln_c_function_v1("torchkiln::relu(Tensor x) -> Tensor"));
  AtenTensorHandle out = nullptr;
  relu(reinterpret_cast<AtenTensorHandle>(&x), &out);
  at::Tensor* result = reinterpret_cast<at::Tensor*>(out);
  const at::Tensor copy = *result;
  delete result;
  return copy;
}

/// Whether no C function is found for the schema, with an error that begins with these words.
bool refuses(const char* schema, const std::string& words) {
  try {
    torchkiln_c_function_v1(schema);
  } catch (const c10::Error& error) {
    if (std::string(error.what_without_backtrace()).rfind(words, 0) == 0) return true;
    std::fprintf(stderr, "with_torch: %s\n", error.what_without_backtrace());
  }
  return false;
}

}  // namespace

int main() {
  torch::manual_seed(2026);
  const at::Tensor x = torch::randn({17, 33}).requires_grad_();
  const at::Tensor bias = torch::randn({33}).requires_grad_();
  const at::Tensor grad = torch::randn({17, 33});

  const at::Tensor out = torchkiln::bias_act(x, bias, {0.5});
  const at::Tensor expected = torch::relu(x * 0.5 + bias);
  const auto grads = torch::autograd::grad({out}, {x, bias}, {grad});
  const auto expected_grads = torch::autograd::grad({expected}, {x, bias}, {grad});

  at::Tensor plain = torch::randn({17, 33});

  const bool right = close("output", out, expected) &&
                     close("gradient of x", grads[0], expected_grads[0]) &&
                     close("gradient of bias", grads[1], expected_grads[1]) &&
                     close("sum", torchkiln::add(x, bias), x + bias) &&
                     close("gelu", torchkiln::gelu(plain), torch::gelu(plain)) &&
                     close("relu in C", relu_in_c(plain), torch::relu(plain)) &&
                     refuses("torchkiln::nothing() -> ()", "torchkiln: found no op") &&
                     refuses("torchkiln::relu(Tensor x, int n) -> Tensor",
                             "torchkiln: this model was compiled for\n  torchkiln::relu(Tensor x, "
                             "int n) -> Tensor\nbut the op that is loaded is\n  torchkiln::relu("
                             "Tensor x) -> Tensor\n");
  if (right) std::printf("with_torch: torch %s, output and gradients right\n", TORCH_VERSION);
  return right ? 0 : 1;
}
