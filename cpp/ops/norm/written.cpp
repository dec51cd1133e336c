// Norms that write to tensors of the caller, for inference: no gradients. kernel.cpp has the
// launch. Except for `out`, the arguments are those of the ops in norm.cpp.

#include "torchkiln/torch/written.h"
#include "norm/norm.h"

namespace torchkiln::norm_ops {
namespace {

/// Writes the norm of x to `out`.
template <class Kind>
struct NormOut {
  struct Arguments : Kind {
    Borrowed<Tensor> out;

    template <class Self>
    static auto fields(Self& self) {
      return std::tuple_cat(std::tie(self.x), Kind::fields(self), std::tie(self.out));
    }
  };

  static void meta(const Arguments& call) {
    check(call);
    check_written(call.op(), "out", call.out, call.x->sym_sizes(), call.x, call.x->scalar_type());
  }

  static void kernel(const Arguments& call) {
    meta(call);
    check_overlap(call.out, call.x);
    run_into(call, {*call.out, Tensor(), Tensor()});
    mark_written(call.out);
  }
};

/// Overwrites x by the norm of x + residual, and residual by this sum.
template <class Kind>
struct AddNormInPlace {
  struct Arguments : Kind {
    void complete() {
      Kind::complete();
      this->in_place = true;
    }

    template <class Self>
    static auto fields(Self& self) {
      return std::tuple_cat(std::tie(self.x, self.residual), Kind::fields(self));
    }
  };

  static void meta(const Arguments& call) {
    check(call);
    const Tensor& x = call.x;
    check_written(call.op(), "x", x, x.sym_sizes(), x, x.scalar_type());
    check_written(call.op(), "residual", call.residual, x.sym_sizes(), x, x.scalar_type());
  }

  static void kernel(const Arguments& call) {
    meta(call);
    at::assert_no_overlap(call.x, call.residual);
    run_into(call, {*call.x, *call.residual, Tensor()});
    mark_written(call.x);
    mark_written(call.residual);
  }
};

struct LayerNormOut : NormOut<LayerNormCall> {
  static constexpr const char* kName = "layer_norm";
  static constexpr const char* kSchema =
      "torchkiln::_layer_norm_out(Tensor x, SymInt[1] normalized_shape, Tensor? weight, "
      "Tensor? bias, float eps, float offset, str round, Tensor(a!) out) -> ()";
};

struct RmsNormOut : NormOut<RmsNormCall> {
  static constexpr const char* kName = "rms_norm";
  static constexpr const char* kSchema =
      "torchkiln::_rms_norm_out(Tensor x, SymInt[1] normalized_shape, Tensor? weight, float? eps, "
      "float offset, str round, Tensor(a!) out) -> ()";
};

struct AddLayerNormInPlace : AddNormInPlace<LayerNormCall> {
  static constexpr const char* kSchema =
      "torchkiln::add_layer_norm_(Tensor(a!) x, Tensor(b!) residual, SymInt[1] normalized_shape, "
      "Tensor? weight=None, Tensor? bias=None, float eps=1e-05, *, float offset=0.0, "
      "str round=\"once\") -> ()";
};

struct AddRmsNormInPlace : AddNormInPlace<RmsNormCall> {
  static constexpr const char* kSchema =
      "torchkiln::add_rms_norm_(Tensor(a!) x, Tensor(b!) residual, SymInt[1] normalized_shape, "
      "Tensor? weight=None, float? eps=None, *, float offset=0.0, str round=\"once\") -> ()";
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) {
  define<LayerNormOut, RmsNormOut, AddLayerNormInPlace, AddRmsNormInPlace>(m);
}

}  // namespace torchkiln::norm_ops
