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

void check_input(const char* op, const Tensor& x) {
  check_tensor(op, "x", x);
  check_dtype(op, "x", x);
  check_not_0_dim(op, "x", x);
}

/// The gradient of x.
struct Backward {
  static constexpr const char* kName = "OPNAME_backward";
  static constexpr const char* kSchema =
      "PACKAGE::OPNAME_backward(Tensor grad, Tensor x) -> Tensor";

  static Tensor meta(const Tensor& grad, const Tensor& x) {
    check_input(kName, x);
    check_tensors(kName, {{"x", x}, {"grad", grad}});
    check_same_dtype(kName, "grad", grad, "x", x);
    TORCH_CHECK(grad.sym_sizes().equals(x.sym_sizes().slice(0, x.dim() - 1)),
                "PACKAGE.OPNAME_backward: grad: got shape ", grad.sym_sizes(),
                ", expected that of x without its last dimension; x has shape ", x.sym_sizes());
    return empty_contiguous(x);
  }

  static Tensor kernel(const Tensor& grad, const Tensor& x) {
    Tensor grad_x = meta(grad, x);
    launch_elementwise(
        kName, std::array{grad_x}, std::array{grad.unsqueeze(-1), x},
        [](const auto& p, auto stream) { return cuda::OPNAME_backward(p, stream); },
        [](const auto& p, int64_t begin, int64_t end) {
          return cpu::OPNAME_backward(p, begin, end);
        });
    return grad_x;
  }
};

struct Op {
  static constexpr const char* kName = "OPNAME";
  static constexpr const char* kSchema = "PACKAGE::OPNAME(Tensor x) -> Tensor";
  /// Called with the incoming gradient and the arguments of the op.
  using BackwardOp = Backward;

  /// The output without data, after the checks. torch.compile calls it to learn sizes and dtypes.
  static Tensor meta(const Tensor& x) {
    check_input(kName, x);
    return empty_of(x.sym_sizes().slice(0, x.dim() - 1), x);
  }

  /// The computation, on the CPU or a GPU.
  static Tensor kernel(const Tensor& x) {
    Tensor out = meta(x);
    if (out.numel() == 0) return out;
    const Tensor matrix = x.contiguous();
    const int64_t columns = x.size(-1);
    const OPNAME_parts::Rows arguments{matrix.const_data_ptr(), out.mutable_data_ptr(), dtype_of(x),
                                       out.numel(), columns};
    const int64_t grain = std::max<int64_t>(1, kElementwiseGrain / (columns + 1));  // in rows
    launch(
        kName, out, out.numel(), grain,
        [&](auto stream) { return cuda::OPNAME(arguments, stream); },
        [&](int64_t begin, int64_t end) { return cpu::OPNAME(arguments, begin, end); });
    return out;
  }

  /// The formula in torch's own ops, in the same precision: for vmap, torch.func and the gradients
  /// of gradients, which torch derives from it.
  static Tensor composite(const Tensor& x) {
    check_input(kName, x);
    const at::ScalarType compute = compute_dtype(x.scalar_type());
    return x.to(compute).square().sum(-1).to(x.scalar_type());
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(PACKAGE, m) { define<Backward, Op>(m); }

}  // namespace PACKAGE::OPNAME_ops

namespace PACKAGE {

at::Tensor OPNAME(const at::Tensor& x) { return torchkiln::call<OPNAME_ops::Op>(x); }

}  // namespace PACKAGE
