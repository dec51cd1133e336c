// The op gated_rms_norm and its derivatives. Forward saves rstd of each group; backward reads x and
// gate once more. kernel.cpp has the checks and kernels. composed.cpp computes rows that are too
// long for one kernel with those of swiglu and rms_norm.

#include "gated_norm/gated_norm.h"

#include "detail/normalized_shape.h"
#include "norm/norm.h"
#include "torchkiln/torch/ops.h"

namespace torchkiln::gated_norm_ops {
namespace {

/// Settings of a call that backward needs besides the saved tensors.
struct Settings {
  int64_t dims;  // number of normalized dimensions
  double eps;
  bool gate_first;
  int64_t groups;
  double offset;

  explicit Settings(const Call& call)
      : dims(static_cast<int64_t>(call.shape.size())),
        eps(call.eps),
        gate_first(call.gate_first),
        groups(call.groups),
        offset(call.offset) {}
};

/// The formula with torch's own ops, in the dtype of x.
Tensor composite_wide(const Tensor& x, const Tensor& gate, const Tensor& weight,
                      const Settings& settings) {
  const Tensor passed = at::silu(gate);
  Tensor y = settings.gate_first ? x * passed : x;
  const bool split = settings.groups > 1;
  if (split) y = at::unflatten_symint(y, -1, {settings.groups, y.sym_size(-1) / settings.groups});
  const Tensor none;
  y = norm_ops::composite_norm(y, settings.dims, none, none, settings.eps, /*offset=*/0,
                               /*centered=*/false, /*rounded=*/y.scalar_type());
  if (split) y = y.flatten(-2);
  if (weight.defined()) y = y * (weight.to(y.scalar_type()) + settings.offset);
  return settings.gate_first ? y : y * passed;
}

Tensor composite(const Call& call) {
  outputs(call, /*wants_rstd=*/false);  // for its checks
  const at::ScalarType compute = compute_dtype(call.x->scalar_type());
  return composite_wide(call.x->to(compute), call.gate->to(compute),
                        tensor_or_undefined(call.weight), Settings(call))
      .to(call.x->scalar_type());
}

/// The gradients of x, gate and weight. `kept` has x, gate, rstd and weight.
variable_list gradients(const Incoming& in, const Kept<4>& kept, const Settings& settings) {
  const auto& [x, gate, rstd, weight] = kept;
  const Backward::Wanted wanted{in.wants(0), in.wants(1), in.wants(2)};
  if (!in.needs_composite()) {
    auto [grad_x, grad_gate, grad_weight] = call_below<Backward>(
        in[0], x, gate, rstd, maybe(weight), settings.gate_first, settings.offset, wanted);
    return {grad_x, grad_gate, grad_weight};
  }
  const at::ScalarType dtype = x.scalar_type(), compute = compute_dtype(dtype);
  variable_list found = composite_gradients(
      in, std::array{x.to(compute), gate.to(compute), weight}, wanted, [&](const auto& inputs) {
        return composite_wide(inputs[0], inputs[1], inputs[2], settings).to(dtype);
      });
  for (size_t i = 0; i < 2; ++i)
    if (found[i].defined()) found[i] = found[i].to(dtype);
  return found;
}

struct Op {
  static constexpr bool kFlexibleLayout = true;
  static constexpr const char* kSchema =
      "torchkiln::gated_rms_norm(Tensor x, Tensor gate, SymInt[1] normalized_shape, "
      "Tensor? weight=None, float? eps=None, *, bool gate_first=False, int groups=1, "
      "float offset=0.0) -> Tensor";
  static constexpr std::array<size_t, 2> kPromotedBy{0, 1};

  struct Arguments : Call {
    std::optional<double> given_eps;  // default: the epsilon of the compute dtype

    void complete() { eps = given_eps.value_or(default_eps(x)); }

    TORCHKILN_FIELDS(self.x, self.gate, self.shape, self.weight, self.given_eps, self.gate_first,
                     self.groups, self.offset);
  };

  static Tensor meta(const Arguments& call) {
    return std::get<0>(outputs(call, /*wants_rstd=*/false));
  }
  static Tensor kernel(const Arguments& call) {
    return std::get<0>(run(call, /*wants_rstd=*/false));
  }
  static Tensor composite(const Arguments& call) { return gated_norm_ops::composite(call); }
  static Tensor recorded(const Below& below, const Arguments& call) {
    auto [y, rstd] = below.call<Forward>(call);
    const Tensor weight = tensor_or_undefined(call.weight);
    return record("gated_rms_norm", {*call.x, *call.gate, weight}, y,
                  keep(*call.x, *call.gate, rstd, weight),
                  [settings = Settings(call)](const Incoming& in, const Kept<4>& kept) {
                    return gradients(in, kept, settings);
                  });
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) { define<Forward, Backward, Op>(m); }

}  // namespace torchkiln::gated_norm_ops

namespace torchkiln {

at::Tensor gated_rms_norm(const at::Tensor& x, const at::Tensor& gate,
                          c10::SymIntArrayRef normalized_shape, const MaybeTensor& weight,
                          const GatedNormOptions& options) {
  return call<gated_norm_ops::Op>(x, gate, normalized_shape, weight, options);
}

}  // namespace torchkiln
