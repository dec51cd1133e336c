// The op for torch: schema, checks, outputs, gradients. Torch's headers are included here, not in
// the kernels, which compile much faster without them.

#include "PACKAGE/kernels/OPNAME.h"
#include "PACKAGE/torch/ops.h"
#include "torchkiln/torch/checks.h"
#include "torchkiln/torch/elementwise.h"
#include "torchkiln/torch/empty.h"
#include "torchkiln/torch/op.h"

namespace PACKAGE::OPNAME_ops {
namespace {

using namespace torchkiln;
using at::Tensor;

void check_inputs(const char* op, const Tensor& x, const Tensor& gate) {
  check_tensor(op, "x", x);
  check_dtype(op, "x", x);
  check_like(op, "gate", gate, "x", x);
}

/// The gradients of x and gate.
struct Backward {
  static constexpr const char* kName = "OPNAME_backward";
  static constexpr const char* kSchema =
      "PACKAGE::OPNAME_backward(Tensor grad, Tensor x, Tensor gate, float scale) -> "
      "(Tensor, Tensor)";
  using Gradients = std::tuple<Tensor, Tensor>;

  static Gradients meta(const Tensor& grad, const Tensor& x, const Tensor& gate, double) {
    check_inputs(kName, x, gate);
    check_like(kName, "grad", grad, "x", x);
    return {empty_contiguous(x), empty_contiguous(gate)};
  }

  static Gradients kernel(const Tensor& grad, const Tensor& x, const Tensor& gate, double scale) {
    auto [grad_x, grad_gate] = meta(grad, x, gate, scale);
    launch_elementwise(
        kName, std::array{grad_x, grad_gate}, std::array{grad, x, gate},
        [&](const auto& p, auto stream) { return cuda::OPNAME_backward(p, scale, stream); },
        [&](const auto& p, int64_t begin, int64_t end) {
          return cpu::OPNAME_backward(p, scale, begin, end);
        });
    return {grad_x, grad_gate};
  }
};

struct Op {
  static constexpr const char* kName = "OPNAME";
  static constexpr const char* kSchema =
      "PACKAGE::OPNAME(Tensor x, Tensor gate, float scale=1.0) -> Tensor";
  /// Called with the incoming gradient and the arguments of the op.
  using BackwardOp = Backward;

  /// The output without data, after the checks. torch.compile calls it to learn sizes and dtypes.
  static Tensor meta(const Tensor& x, const Tensor& gate, double) {
    check_inputs(kName, x, gate);
    return empty_contiguous(x);
  }

  /// The computation, on the CPU or a GPU. Strides and ranges are up to launch_elementwise().
  static Tensor kernel(const Tensor& x, const Tensor& gate, double scale) {
    Tensor out = meta(x, gate, scale);
    launch_elementwise(
        kName, std::array{out}, std::array{x, gate},
        [&](const auto& p, auto stream) { return cuda::OPNAME(p, scale, stream); },
        [&](const auto& p, int64_t begin, int64_t end) {
          return cpu::OPNAME(p, scale, begin, end);
        });
    return out;
  }

  /// The formula in torch's own ops, in the same precision: for vmap, torch.func and the gradients
  /// of gradients, which torch derives from it.
  static Tensor composite(const Tensor& x, const Tensor& gate, double scale) {
    check_inputs(kName, x, gate);
    const at::ScalarType compute = compute_dtype(x.scalar_type());
    return (x.to(compute) * at::sigmoid(gate.to(compute) * scale)).to(x.scalar_type());
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(PACKAGE, m) { define<Backward, Op>(m); }

}  // namespace PACKAGE::OPNAME_ops

namespace PACKAGE {

at::Tensor OPNAME(const at::Tensor& x, const at::Tensor& gate, double scale) {
  return torchkiln::call<OPNAME_ops::Op>(x, gate, scale);
}

}  // namespace PACKAGE
