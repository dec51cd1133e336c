// Norms that write into tensors of the caller, for inference: no gradients.

#include "torchkiln/torch/written.h"
#include "norm/norm.h"

namespace torchkiln::norm_ops {
namespace {

using c10::SymIntArrayRef;

/// The norm of x, into `out`; Derived::make builds the Call.
template <class Derived, class... Args>
struct NormOut {
  static void meta(const Tensor& x, Args... args, const Tensor& out) {
    check(Derived::make(x, nullptr, args...));
    check_written(Derived::kName, "out", out, x.sym_sizes(), x, x.scalar_type());
  }

  static void kernel(const Tensor& x, Args... args, const Tensor& out) {
    meta(x, args..., out);
    check_overlap(out, x);
    run_into(Derived::make(x, nullptr, args...), {out, Tensor(), Tensor()});
    mark_written(out);
  }
};

/// x becomes the norm of x + residual, and residual the sum.
template <class Derived, class... Args>
struct AddNormInPlace {
  static void meta(const Tensor& x, const Tensor& residual, Args... args) {
    check(Derived::make(x, &residual, args...));
    check_written(Derived::kName, "x", x, x.sym_sizes(), x, x.scalar_type());
    check_written(Derived::kName, "residual", residual, x.sym_sizes(), x, x.scalar_type());
  }

  static void kernel(const Tensor& x, const Tensor& residual, Args... args) {
    meta(x, residual, args...);
    at::assert_no_overlap(x, residual);
    run_into(Derived::make(x, &residual, args...), {x, residual, Tensor()});
    mark_written(x);
    mark_written(residual);
  }
};

struct LayerNormOut : NormOut<LayerNormOut, SymIntArrayRef, const MaybeTensor&, const MaybeTensor&,
                              double, double, NormRounding> {
  static constexpr const char* kName = "layer_norm";
  static constexpr const char* kSchema =
      "torchkiln::layer_norm_out(Tensor x, SymInt[1] normalized_shape, Tensor? weight, "
      "Tensor? bias, float eps, float offset, str round, Tensor(a!) out) -> ()";
  static constexpr auto make = layer_norm_call;
};

struct RmsNormOut : NormOut<RmsNormOut, SymIntArrayRef, const MaybeTensor&, std::optional<double>,
                            double, NormRounding> {
  static constexpr const char* kName = "rms_norm";
  static constexpr const char* kSchema =
      "torchkiln::rms_norm_out(Tensor x, SymInt[1] normalized_shape, Tensor? weight, float? eps, "
      "float offset, str round, Tensor(a!) out) -> ()";
  static constexpr auto make = rms_norm_call;
};

struct AddLayerNormInPlace : AddNormInPlace<AddLayerNormInPlace, SymIntArrayRef, const MaybeTensor&,
                                            const MaybeTensor&, double, double, NormRounding> {
  static constexpr const char* kName = "add_layer_norm_";
  static constexpr const char* kSchema =
      "torchkiln::add_layer_norm_(Tensor(a!) x, Tensor(b!) residual, SymInt[1] normalized_shape, "
      "Tensor? weight=None, Tensor? bias=None, float eps=1e-05, *, float offset=0.0, "
      "str round=\"once\") -> ()";
  static constexpr auto make = layer_norm_call;
};

struct AddRmsNormInPlace : AddNormInPlace<AddRmsNormInPlace, SymIntArrayRef, const MaybeTensor&,
                                          std::optional<double>, double, NormRounding> {
  static constexpr const char* kName = "add_rms_norm_";
  static constexpr const char* kSchema =
      "torchkiln::add_rms_norm_(Tensor(a!) x, Tensor(b!) residual, SymInt[1] normalized_shape, "
      "Tensor? weight=None, float? eps=None, *, float offset=0.0, str round=\"once\") -> ()";
  static constexpr auto make = rms_norm_call;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) {
  define<LayerNormOut, RmsNormOut, AddLayerNormInPlace, AddRmsNormInPlace>(m);
}

}  // namespace torchkiln::norm_ops
