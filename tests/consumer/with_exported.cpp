// A model that Python has exported and AOTInductor compiled, with an operator that stays one in it:
// run here without Python, at a size that it was not exported at.

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <cstdio>

#include "torchkiln/ops.h"

int main(int count, char** arguments) {
  if (count != 2) return 2;
  torch::manual_seed(2026);
  const at::Tensor x = torch::randn({29, 33});
  const at::Tensor weight = torch::randn({33});

  const at::NoGradGuard no_grad;
  torch::inductor::AOTIModelPackageLoader model(arguments[1]);
  const std::vector<at::Tensor> found = model.run({x, weight});
  const at::Tensor expected = torchkiln::rms_norm(x, {33}, weight) * 2;
  const bool right = found.size() == 1 && at::allclose(found[0], expected, 1e-5, 1e-5);
  if (right) std::printf("with_exported: right\n");
  return right ? 0 : 1;
}
