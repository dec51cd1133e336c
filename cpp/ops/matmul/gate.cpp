// A product and a gate in one kernel, on compute capability 9.0: forward and backward of the hidden
// layer of gated_mlp. The functions return nothing if separate kernels take less time.

#include "matmul/gate.h"

#include "matmul/kernel.h"

namespace torchkiln::gate_products {
namespace {

using at::Tensor;
using Two = std::tuple<Tensor, Tensor>;

/// Launches the kernel of a product and a gate if that takes less time, and returns whether it did.
template <class Product>
bool run_with_gate(const Product& arguments, const Tensor& on) {
  bool done = false;
  launch(
      "gated_mlp", on, 0, 1,
      [&](auto stream) -> Status {
        done = cuda::gains_from_gate(arguments);
        if (!done) return {};
        trace::note("product and gate by sm90");
        return cuda::matmul_gate(arguments, stream);
      },
      [](int64_t, int64_t) { return Status{}; });
  return done;
}

/// Whether the tensors are plain, in half precision on a GPU, and large enough for one kernel to
/// take less time on some GPU. The result has [rows of x, columns] elements. Callers test this
/// before they allocate anything.
template <class... Others>
bool may_gain(const Tensor& x, const Tensor& weight, int dim, const Others&... others) {
  constexpr int64_t kLeastResults = int64_t{1} << 22;
  if (!x.is_cuda() || !c10::isReducedFloatingType(x.scalar_type()) ||
      !Below(detail::keys_of(x, weight, others...)).is_plain() || x.numel() == 0)
    return false;
  return x.numel() / x.size(-1) * weight.size(dim) >= kLeastResults;
}

}  // namespace

std::optional<Two> layer_with_gate(const Tensor& x, const Tensor& weight, const MaybeTensor& bias,
                                   Activation act, bool keeps) {
  if (!may_gain(x, weight, /*dim=*/0, bias)) return std::nullopt;
  const Tensor rows = as_matrix(x);
  const int64_t width = weight.size(0);
  const Tensor shift = bias ? bias->contiguous() : Tensor();
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = width;
  const Tensor gate_up = keeps ? at::empty(sizes, x.options()) : Tensor();
  sizes.back() = width / 2;
  Tensor hidden = at::empty(sizes, x.options());
  Matmul arguments = describe_linear(rows, weight, hidden);
  if (shift.defined()) arguments.bias = shift.const_data_ptr();
  if (keeps) arguments.preactivation = gate_up.data_ptr();
  arguments.activation = act;
  if (!run_with_gate(arguments, hidden)) return std::nullopt;
  return Two{hidden, gate_up};
}

std::optional<Two> gradient_through_gate(const Tensor& grad, const Tensor& weight,
                                         const Tensor& gate_up, Activation act, bool overwrites) {
  if (!may_gain(grad, weight, /*dim=*/1, gate_up) || !gate_up.is_contiguous()) return std::nullopt;
  const Tensor passed = overwrites ? gate_up : at::empty_like(gate_up);
  const Tensor hidden = at::empty({grad.size(0), weight.size(1)}, grad.options());
  GateGradient arguments{};
  arguments.product = describe_linear(grad, weight.t(), hidden);
  arguments.product.activation = act;
  arguments.gate_up = gate_up.const_data_ptr();
  arguments.grad_gate_up = passed.data_ptr();
  if (!run_with_gate(arguments, hidden)) return std::nullopt;
  return Two{passed, hidden};
}

}  // namespace torchkiln::gate_products
