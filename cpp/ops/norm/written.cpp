// RMS norms that write into tensors of the caller, for inference: no gradients.

#include "torchkiln/torch/written.h"
#include "norm/norm.h"

namespace torchkiln::norm_ops {
namespace {

using c10::SymIntArrayRef;

struct RmsNormOut {
  static constexpr const char* kName = "rms_norm";
  static constexpr const char* kSchema =
      "torchkiln::rms_norm_out(Tensor x, SymInt[1] normalized_shape, Tensor? weight, float? eps, "
      "float offset, Tensor(a!) out) -> ()";

  static void meta(const Tensor& x, SymIntArrayRef shape, const MaybeTensor& weight,
                   std::optional<double> eps, double offset, const Tensor& out) {
    check(rms_norm_call(x, nullptr, shape, weight, eps, offset));
    check_written(kName, "out", out, x.sym_sizes(), x, x.scalar_type());
  }

  static void kernel(const Tensor& x, SymIntArrayRef shape, const MaybeTensor& weight,
                     std::optional<double> eps, double offset, const Tensor& out) {
    meta(x, shape, weight, eps, offset, out);
    check_overlap(out, x);
    run_into(rms_norm_call(x, nullptr, shape, weight, eps, offset), {out, Tensor(), Tensor()});
    mark_written(out);
  }
};

/// x becomes the norm, residual the sum.
struct AddRmsNormInPlace {
  static constexpr const char* kName = "add_rms_norm_";
  static constexpr const char* kSchema =
      "torchkiln::add_rms_norm_(Tensor(a!) x, Tensor(b!) residual, SymInt[1] normalized_shape, "
      "Tensor? weight=None, float? eps=None, *, float offset=0.0) -> ()";

  static void meta(const Tensor& x, const Tensor& residual, SymIntArrayRef shape,
                   const MaybeTensor& weight, std::optional<double> eps, double offset) {
    check(rms_norm_call(x, &residual, shape, weight, eps, offset));
    check_written(kName, "x", x, x.sym_sizes(), x, x.scalar_type());
    check_written(kName, "residual", residual, x.sym_sizes(), x, x.scalar_type());
  }

  static void kernel(const Tensor& x, const Tensor& residual, SymIntArrayRef shape,
                     const MaybeTensor& weight, std::optional<double> eps, double offset) {
    meta(x, residual, shape, weight, eps, offset);
    at::assert_no_overlap(x, residual);
    run_into(rms_norm_call(x, &residual, shape, weight, eps, offset), {x, residual, Tensor()});
    mark_written(x);
    mark_written(residual);
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) { define<RmsNormOut, AddRmsNormInPlace>(m); }

}  // namespace torchkiln::norm_ops
