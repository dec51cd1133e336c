// The pieces that torchkiln's own operators are made of, for an operator of one's own.

#include <torch/torch.h>

#include <cstdio>
#include <string>

#include "torchkiln/torch/checks.h"
#include "torchkiln/torch/launch.h"
#include "torchkiln/torch/workspace.h"

#ifdef TORCHKILN_WITH_CUDA
#include "torchkiln/torch/handles.h"
#endif

namespace {

using torchkiln::Status;

/// A kernel that knows nothing of torch: norms[row] = sum of x[row]^2, for some rows.
Status squared_norms(const float* x, float* norms, int64_t columns, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    norms[row] = 0;
    for (int64_t i = 0; i < columns; ++i) norms[row] += x[row * columns + i] * x[row * columns + i];
  }
  return {};
}

at::Tensor row_products(const at::Tensor& x, const at::Tensor& weight) {
  constexpr const char* kOp = "row_products";
  torchkiln::check_tensors(kOp, {{"x", x}, {"weight", weight}});
  torchkiln::check_dtype(kOp, "x", x);
  torchkiln::check_same_dtype(kOp, "weight", weight, "x", x);
  torchkiln::check_rank(kOp, "x", x, 2, 2, "[rows, columns]");
  torchkiln::check_size(kOp, "weight", weight, 0, x.sym_size(0), "the rows of x");
  torchkiln::check_contiguous(kOp, "x", x);

  const int64_t rows = x.size(0);
  const torchkiln::Workspace workspace(x.device(), rows * sizeof(float));
  float* norms = static_cast<float*>(workspace.data());
  torchkiln::launch(
      kOp, x, rows, /*grain=*/16,
      [](auto) { return Status{"has no kernel for CUDA, expected a tensor of the CPU"}; },
      [&](int64_t begin, int64_t end) {
        return squared_norms(x.const_data_ptr<float>(), norms, x.size(1), begin, end);
      });
  return at::from_blob(norms, {rows}, x.options()) * weight;
}

bool refuses(const at::Tensor& x, const at::Tensor& weight, const std::string& message) {
  try {
    row_products(x, weight);
  } catch (const c10::Error& error) {
    if (error.what_without_backtrace() == message) return true;
    std::fprintf(stderr, "with_sdk: %s\n", error.what_without_backtrace());
  }
  return false;
}

#ifdef TORCHKILN_WITH_CUDA
/// The handles of torch's pools: the same one again, and on the stream that is current.
bool handles_are_kept(const at::Tensor& x) {
  const torchkiln::Handles handles(x);
  return handles.cublas() == handles.cublas() && handles.cublas_lt() != nullptr &&
         handles.cusparse() == handles.cusparse() &&
         handles.stream() == c10::cuda::getCurrentCUDAStream().stream();
}
#endif

}  // namespace

int main() {
  const at::Tensor x = torch::randn({37, 21});
  const at::Tensor weight = torch::randn({37});
  bool right = at::allclose(row_products(x, weight), (x * x).sum(1) * weight, 1e-5, 1e-5);
  right &= refuses(x, weight.slice(0, 1),
                   "torchkiln.row_products: weight: got size 36 in dimension 0 of shape [36], "
                   "expected 37, the rows of x");
  right &= refuses(x.t(), torch::randn({21}),
                   "torchkiln.row_products: x: got strides [1, 21] of shape [21, 37], expected a "
                   "contiguous tensor; call .contiguous() first");
#ifdef TORCHKILN_WITH_CUDA
  if (torch::cuda::is_available()) right &= handles_are_kept(x.cuda());
#endif
  if (right) std::printf("with_sdk: values and refusals right\n");
  return right ? 0 : 1;
}
