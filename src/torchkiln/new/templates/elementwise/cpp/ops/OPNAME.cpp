#include "PACKAGE/kernels/OPNAME.h"

#include "PACKAGE/torch/ops.h"
#include "torchkiln/torch/formula.h"

namespace PACKAGE::OPNAME_ops {
namespace {

struct Op : torchkiln::FormulaOp<Op, formulas::TYPENAME> {
  static constexpr const char* kSchema =
      "PACKAGE::OPNAME(Tensor x, Tensor gate, float scale=1.0) -> Tensor";

  /// The formula in torch's own ops: for vmap, torch.func and second derivatives.
  static at::Tensor in_torch(const at::Tensor& x, const at::Tensor& gate, double scale) {
    return x * at::sigmoid(gate * scale);
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(PACKAGE, m) { torchkiln::define<Op::Backward, Op>(m); }

}  // namespace PACKAGE::OPNAME_ops

namespace PACKAGE {

at::Tensor OPNAME(const at::Tensor& x, const at::Tensor& gate, double scale) {
  return torchkiln::call<OPNAME_ops::Op>(x, gate, scale);
}

}  // namespace PACKAGE
