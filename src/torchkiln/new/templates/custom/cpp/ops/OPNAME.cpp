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

/// The checked, empty output; on Meta and symbolic tensors, too.
Tensor meta(const Tensor& x, int64_t window) {
  constexpr const char* kOp = "OPNAME";
  torchkiln::check_tensor(kOp, "x", x);
  torchkiln::check_dtype(kOp, "x", x);
  torchkiln::check_rank(kOp, "x", x, 1, kMostDimensions, "[..., columns]");
  TORCH_CHECK_VALUE(window >= 1, "PACKAGE.OPNAME: window: got ", window, ", expected at least 1");
  return at::empty_symint(x.sym_sizes(), x.options().memory_format(at::MemoryFormat::Contiguous));
}

/// `before` elements of each window lie before the one that it is the sum for.
Tensor run(const char* op, const Tensor& x, int64_t window, int64_t before) {
  Tensor out = meta(x, window);
  if (out.numel() == 0) return out;
  const Tensor rows = x.contiguous();
  const int64_t columns = x.size(-1), count = x.numel() / columns;
  const OPNAME_parts::Windows arguments{rows.const_data_ptr(),
                                        out.mutable_data_ptr(),
                                        torchkiln::dtype_of(x),
                                        count,
                                        columns,
                                        window,
                                        before};
  const int64_t grain = std::max<int64_t>(1, torchkiln::kElementwiseGrain / columns);
  torchkiln::launch(
      op, out, count, grain, [&](auto stream) { return cuda::OPNAME(arguments, stream); },
      [&](int64_t begin, int64_t end) { return cpu::OPNAME(arguments, begin, end); });
  return out;
}

Tensor forward(const Tensor& x, int64_t window) { return run("OPNAME", x, window, window - 1); }

std::vector<Tensor> backward_meta(const Tensor& grad, const Tensor& x, int64_t window) {
  constexpr const char* kOp = "OPNAME_backward";
  torchkiln::check_tensors(kOp, {{"x", x}, {"grad", grad}});
  torchkiln::check_same_dtype(kOp, "grad", grad, "x", x);
  torchkiln::check_same_shape(kOp, "grad", grad, "x", x);
  return {meta(grad, window)};
}

/// Each element counted in its own sum and in the `window - 1` after it.
std::vector<Tensor> backward(const Tensor& grad, const Tensor& x, int64_t window) {
  backward_meta(grad, x, window);
  return {run("OPNAME_backward", grad, window, 0)};
}

struct Op {
  static constexpr const char* kName = "PACKAGE::OPNAME";
  static constexpr const char* kBackward = "PACKAGE::OPNAME_backward";

  /// In torch's own ops, and as precise: for transforms and for second derivatives.
  static Tensor composite(const Tensor& x, int64_t window) {
    meta(x, window);
    const at::ScalarType compute = torchkiln::compute_dtype(x.scalar_type());
    const Tensor padded = at::constant_pad_nd(x.to(compute), {window - 1, 0});
    Tensor sum = at::zeros_like(x, x.options().dtype(compute));
    for (int64_t at = 0; at < window; ++at)
      sum = sum + padded.narrow_symint(-1, at, x.sym_size(-1));
    return sum.to(x.scalar_type());
  }
};

const auto& op() {
  static const auto op = torchkiln::find_op<Tensor(const Tensor&, int64_t)>(Op::kName);
  return op;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(PACKAGE, m) {
  m.def("OPNAME(Tensor x, int window=4) -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def("OPNAME_backward(Tensor grad, Tensor x, int window) -> Tensor[]",
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

at::Tensor OPNAME(const at::Tensor& x, int64_t window) { return OPNAME_ops::op().call(x, window); }

}  // namespace PACKAGE
