// A model that Python has exported and AOTInductor compiled, of every operator: run here without
// Python, at a size that it was not exported at, beside the same calls of the library.

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <cstdio>

#include "torchkiln/torch/ops.h"

int main(int count, char** arguments) {
  if (count != 2) return 2;
  torch::manual_seed(2026);
  const at::Tensor x = torch::randn({29, 33});
  const at::Tensor matrix = torch::randn({33, 33});
  const at::Tensor weight = torch::randn({33});
  const at::Tensor bias = torch::randn({33});
  const at::Tensor target = torch::arange(29);
  const at::Tensor values = torch::randn({33});
  const at::Tensor crow = torch::arange(34);  // a diagonal
  const at::Tensor col = torch::arange(33);

  const at::NoGradGuard no_grad;
  torch::inductor::AOTIModelPackageLoader model(arguments[1]);
  const std::vector<at::Tensor> found =
      model.run({x, matrix, weight, bias, target, values, crow, col});

  std::vector<at::Tensor> expected{torchkiln::add(x, bias), torchkiln::muladd(x, weight, bias)};
  for (const char* act :
       {"square", "relu", "relu2", "gelu", "gelu_tanh", "quick_gelu", "silu", "sigmoid", "tanh"})
    expected.push_back(torchkiln::activation(x, act));
  const auto [layer, layer_sum] = torchkiln::add_layer_norm(x, x, {33}, weight, bias);
  const auto [rms, rms_sum] = torchkiln::add_rms_norm(x, x, {33}, weight);
  for (const at::Tensor& one : {
           torchkiln::bias_act(x, bias, {0.5, "gelu"}),
           torchkiln::swiglu(x, x),
           torchkiln::geglu(x, x),
           torchkiln::geglu_tanh(x, x),
           torchkiln::dropout_add(x, x, 0.5, /*training=*/false),
           torchkiln::bias_dropout_add(x, bias, x, 0.5, /*training=*/false),
           torchkiln::sum(x, 0),
           torchkiln::mean(x, 1),
           torchkiln::layer_norm(x, {33}, weight, bias),
           torchkiln::rms_norm(x, {33}, weight),
           layer,
           layer_sum,
           rms,
           rms_sum,
           torchkiln::softmax(x, 1),
           torchkiln::log_softmax(x, 1),
           torchkiln::cross_entropy(x, target),
           torchkiln::spmm(values, x.t().contiguous(), crow, col),
           torchkiln::matmul(x, matrix),
           torchkiln::linear(x, matrix, bias, {"relu"}),
       })
    expected.push_back(one);

  if (found.size() != expected.size()) {
    std::printf("with_exported: got %zu results, expected %zu\n", found.size(), expected.size());
    return 1;
  }
  for (size_t i = 0; i < found.size(); ++i) {
    if (at::allclose(found[i], expected[i], 1e-4, 1e-5)) continue;
    std::printf("with_exported: result %zu is wrong\n", i);
    return 1;
  }
  std::printf("with_exported: %zu results are right\n", found.size());
  return 0;
}
