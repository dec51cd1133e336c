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

void check_inputs(const char* op, const Tensor& x, int64_t window) {
  check_tensor(op, "x", x);
  check_dtype(op, "x", x);
  check_not_0_dim(op, "x", x);
  TORCH_CHECK_VALUE(window >= 1, "PACKAGE.", op, ": window: got ", window, ", expected at least 1");
}

/// Writes the sums to `out`. `before` elements of each window precede the element that it is for.
void sum_windows(const char* op, const Tensor& out, const Tensor& x, int64_t window,
                 int64_t before) {
  if (out.numel() == 0) return;
  const Tensor matrix = x.contiguous();
  const int64_t columns = x.size(-1), rows = x.numel() / columns;
  const OPNAME_parts::Windows arguments{
      matrix.const_data_ptr(), out.mutable_data_ptr(), dtype_of(x), rows, columns, window, before};
  const int64_t grain = std::max<int64_t>(1, kElementwiseGrain / columns);  // in rows
  launch(
      op, out, rows, grain, [&](auto stream) { return cuda::OPNAME(arguments, stream); },
      [&](int64_t begin, int64_t end) { return cpu::OPNAME(arguments, begin, end); });
}

/// The gradient of x: each element is in its own sum and in the `window - 1` sums after it.
struct Backward {
  static constexpr const char* kName = "OPNAME_backward";
  static constexpr const char* kSchema =
      "PACKAGE::OPNAME_backward(Tensor grad, Tensor x, int window) -> Tensor";

  static Tensor meta(const Tensor& grad, const Tensor& x, int64_t window) {
    check_inputs(kName, x, window);
    check_like(kName, "grad", grad, "x", x);
    return empty_contiguous(x);
  }

  static Tensor kernel(const Tensor& grad, const Tensor& x, int64_t window) {
    Tensor grad_x = meta(grad, x, window);
    sum_windows(kName, grad_x, grad, window, /*before=*/0);
    return grad_x;
  }
};

struct Op {
  static constexpr const char* kName = "OPNAME";
  static constexpr const char* kSchema = "PACKAGE::OPNAME(Tensor x, int window=4) -> Tensor";
  /// Called with the incoming gradient and the arguments of the op.
  using BackwardOp = Backward;

  /// The output without data, after the checks. torch.compile calls it to learn sizes and dtypes.
  static Tensor meta(const Tensor& x, int64_t window) {
    check_inputs(kName, x, window);
    return empty_contiguous(x);
  }

  /// The computation, on the CPU or a GPU.
  static Tensor kernel(const Tensor& x, int64_t window) {
    Tensor out = meta(x, window);
    sum_windows(kName, out, x, window, window - 1);
    return out;
  }

  /// The formula in torch's own ops, in the same precision: for vmap, torch.func and the gradients
  /// of gradients, which torch derives from it.
  static Tensor composite(const Tensor& x, int64_t window) {
    check_inputs(kName, x, window);
    const at::ScalarType compute = compute_dtype(x.scalar_type());
    const Tensor padded = at::constant_pad_nd(x.to(compute), {window - 1, 0});
    Tensor sum = at::zeros_like(x, x.options().dtype(compute));
    for (int64_t at = 0; at < window; ++at)
      sum = sum + padded.narrow_symint(-1, at, x.sym_size(-1));
    return sum.to(x.scalar_type());
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(PACKAGE, m) { define<Backward, Op>(m); }

}  // namespace PACKAGE::OPNAME_ops

namespace PACKAGE {

at::Tensor OPNAME(const at::Tensor& x, int64_t window) {
  return torchkiln::call<OPNAME_ops::Op>(x, window);
}

}  // namespace PACKAGE
