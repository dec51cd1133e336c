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

constexpr int64_t kMostDimensions = 64;

void check(const char* op, const Tensor& x) {
  torchkiln::check_tensor(op, "x", x);
  torchkiln::check_dtype(op, "x", x);
  torchkiln::check_rank(op, "x", x, 1, kMostDimensions, "[..., columns]");
}

/// The checked, empty output; on Meta and symbolic tensors, too.
Tensor meta(const Tensor& x) {
  check("OPNAME", x);
  return at::empty_symint(x.sym_sizes().slice(0, x.dim() - 1), x.options());
}

Tensor forward(const Tensor& x) {
  Tensor out = meta(x);
  if (out.numel() == 0) return out;
  const Tensor rows = x.contiguous();
  const int64_t columns = x.size(-1);
  const OPNAME_parts::Rows arguments{rows.const_data_ptr(), out.mutable_data_ptr(),
                                     torchkiln::dtype_of(x), out.numel(), columns};
  const int64_t grain = std::max<int64_t>(1, torchkiln::kElementwiseGrain / (columns + 1));
  torchkiln::launch(
      "OPNAME", out, out.numel(), grain,
      [&](auto stream) { return cuda::OPNAME(arguments, stream); },
      [&](int64_t begin, int64_t end) { return cpu::OPNAME(arguments, begin, end); });
  return out;
}

std::vector<Tensor> backward_meta(const Tensor& grad, const Tensor& x) {
  constexpr const char* kOp = "OPNAME_backward";
  check(kOp, x);
  torchkiln::check_tensors(kOp, {{"x", x}, {"grad", grad}});
  torchkiln::check_same_dtype(kOp, "grad", grad, "x", x);
  TORCH_CHECK(grad.sym_sizes().equals(x.sym_sizes().slice(0, x.dim() - 1)), "PACKAGE.", kOp,
              ": grad: got shape ", grad.sym_sizes(), ", expected the rows of x, which has shape ",
              x.sym_sizes());
  return {at::empty_symint(x.sym_sizes(), x.options().memory_format(at::MemoryFormat::Contiguous))};
}

std::vector<Tensor> backward(const Tensor& grad, const Tensor& x) {
  const std::vector<Tensor> out = backward_meta(grad, x);
  if (x.numel() == 0) return out;
  std::array<Tensor, 2> inputs{grad.unsqueeze(-1), x};
  const auto arguments = torchkiln::describe(std::array<Tensor, 1>{out[0]}, inputs);
  torchkiln::launch(
      "OPNAME_backward", x, x.numel(), torchkiln::kElementwiseGrain,
      [&](auto stream) { return cuda::OPNAME_backward(arguments, stream); },
      [&](int64_t begin, int64_t end) { return cpu::OPNAME_backward(arguments, begin, end); });
  return out;
}

struct Op {
  static constexpr const char* kName = "PACKAGE::OPNAME";
  static constexpr const char* kBackward = "PACKAGE::OPNAME_backward";

  /// In torch's own ops, and as precise: for transforms and for second derivatives.
  static Tensor composite(const Tensor& x) {
    check("OPNAME", x);
    const at::ScalarType compute = torchkiln::compute_dtype(x.scalar_type());
    return x.to(compute).square().sum(-1).to(x.scalar_type());
  }
};

const auto& op() {
  static const auto op = torchkiln::find_op<Tensor(const Tensor&)>(Op::kName);
  return op;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(PACKAGE, m) {
  m.def("OPNAME(Tensor x) -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def("OPNAME_backward(Tensor grad, Tensor x) -> Tensor[]", {at::Tag::pt2_compliant_tag});
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

at::Tensor OPNAME(const at::Tensor& x) { return OPNAME_ops::op().call(x); }

}  // namespace PACKAGE
