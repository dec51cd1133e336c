#include <ATen/ATen.h>
#include <torch/library.h>

#include "PACKAGE/kernels/OPNAME.h"
#include "PACKAGE/ops.h"
#include "torchkiln/torch/checks.h"
#include "torchkiln/torch/elementwise.h"
#include "torchkiln/torch/launch.h"
#include "torchkiln/torch/op.h"

namespace PACKAGE::OPNAME_ops {
namespace {

using at::Tensor;

/// The checked, empty output; on Meta and symbolic tensors, too.
Tensor meta(const Tensor& x, const Tensor& gate, double) {
  constexpr const char* kOp = "OPNAME";
  torchkiln::check_tensors(kOp, {{"x", x}, {"gate", gate}});
  torchkiln::check_dtype(kOp, "x", x);
  torchkiln::check_same_dtype(kOp, "gate", gate, "x", x);
  torchkiln::check_same_shape(kOp, "gate", gate, "x", x);
  return at::empty_symint(x.sym_sizes(), x.options().memory_format(at::MemoryFormat::Contiguous));
}

Tensor forward(const Tensor& x, const Tensor& gate, double scale) {
  Tensor out = meta(x, gate, scale);
  if (out.numel() == 0) return out;
  std::array<Tensor, 2> inputs{x, gate};
  const auto arguments = torchkiln::describe(std::array<Tensor, 1>{out}, inputs);
  torchkiln::launch(
      "OPNAME", out, out.numel(), torchkiln::kElementwiseGrain,
      [&](auto stream) { return cuda::OPNAME(arguments, scale, stream); },
      [&](int64_t begin, int64_t end) { return cpu::OPNAME(arguments, scale, begin, end); });
  return out;
}

std::vector<Tensor> backward_meta(const Tensor& grad, const Tensor& x, const Tensor& gate,
                                  double scale) {
  constexpr const char* kOp = "OPNAME_backward";
  torchkiln::check_tensors(kOp, {{"x", x}, {"grad", grad}});
  torchkiln::check_same_dtype(kOp, "grad", grad, "x", x);
  torchkiln::check_same_shape(kOp, "grad", grad, "x", x);
  return {meta(x, gate, scale), meta(x, gate, scale)};
}

std::vector<Tensor> backward(const Tensor& grad, const Tensor& x, const Tensor& gate,
                             double scale) {
  const std::vector<Tensor> out = backward_meta(grad, x, gate, scale);
  if (x.numel() == 0) return out;
  std::array<Tensor, 3> inputs{grad, x, gate};
  const auto arguments = torchkiln::describe(std::array<Tensor, 2>{out[0], out[1]}, inputs);
  torchkiln::launch(
      "OPNAME_backward", x, x.numel(), torchkiln::kElementwiseGrain,
      [&](auto stream) { return cuda::OPNAME_backward(arguments, scale, stream); },
      [&](int64_t begin, int64_t end) {
        return cpu::OPNAME_backward(arguments, scale, begin, end);
      });
  return out;
}

struct Op {
  static constexpr const char* kName = "PACKAGE::OPNAME";
  static constexpr const char* kBackward = "PACKAGE::OPNAME_backward";

  /// In torch's own ops, and as precise: for transforms and for second derivatives.
  static Tensor composite(const Tensor& x, const Tensor& gate, double scale) {
    meta(x, gate, scale);
    const at::ScalarType compute = torchkiln::compute_dtype(x.scalar_type());
    return (x.to(compute) * at::sigmoid(gate.to(compute) * scale)).to(x.scalar_type());
  }
};

const auto& op() {
  static const auto op =
      torchkiln::find_op<Tensor(const Tensor&, const Tensor&, double)>(Op::kName);
  return op;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(PACKAGE, m) {
  m.def("OPNAME(Tensor x, Tensor gate, float scale=1.0) -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def("OPNAME_backward(Tensor grad, Tensor x, Tensor gate, float scale) -> Tensor[]",
        {at::Tag::pt2_compliant_tag});
}

// For all backends, so that what has no kernel (sparse, other devices) meets the checks and not a
// missing entry.
TORCH_LIBRARY_IMPL(PACKAGE, CompositeExplicitAutograd, m) {
  m.impl("OPNAME", TORCH_FN(forward));
  m.impl("OPNAME_backward", TORCH_FN(backward));
}
TORCH_LIBRARY_IMPL(PACKAGE, Meta, m) {
  m.impl("OPNAME", TORCH_FN(meta));
  m.impl("OPNAME_backward", TORCH_FN(backward_meta));
}
TORCH_LIBRARY_IMPL(PACKAGE, Autograd, m) {
  m.impl("OPNAME", TORCH_FN(torchkiln::Differentiable<Op>::call));
}
TORCH_LIBRARY_IMPL(PACKAGE, FuncTorchBatched, m) { m.impl("OPNAME", TORCH_FN(Op::composite)); }

}  // namespace PACKAGE::OPNAME_ops

namespace PACKAGE {

at::Tensor OPNAME(const at::Tensor& x, const at::Tensor& gate, double scale) {
  return OPNAME_ops::op().call(x, gate, scale);
}

}  // namespace PACKAGE
