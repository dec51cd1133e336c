#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <numeric>

#include "norm.h"
#include "torchkiln/autograd.h"
#include "torchkiln/checks.h"
#include "torchkiln/ops.h"

namespace torchkiln::norm_autograd_ops {
namespace {

using at::Tensor;
using c10::SymIntArrayRef;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using Gradients = std::tuple<Tensor, Tensor, Tensor>;
using LayerNormSchema = Tensor(const Tensor&, SymIntArrayRef, const MaybeTensor&,
                               const MaybeTensor&, double);
using RmsNormSchema = Tensor(const Tensor&, SymIntArrayRef, const MaybeTensor&,
                             std::optional<double>, double);
using AddLayerNormSchema = NormResult(const Tensor&, const Tensor&, SymIntArrayRef,
                                      const MaybeTensor&, const MaybeTensor&, double);
using AddRmsNormSchema = NormResult(const Tensor&, const Tensor&, SymIntArrayRef,
                                    const MaybeTensor&, std::optional<double>, double);

const auto& layer_norm_op() {
  static const auto found = find_op<LayerNormSchema>("torchkiln::layer_norm");
  return found;
}
const auto& rms_norm_op() {
  static const auto found = find_op<RmsNormSchema>("torchkiln::rms_norm");
  return found;
}
const auto& add_layer_norm_op() {
  static const auto found = find_op<AddLayerNormSchema>("torchkiln::add_layer_norm");
  return found;
}
const auto& add_rms_norm_op() {
  static const auto found = find_op<AddRmsNormSchema>("torchkiln::add_rms_norm");
  return found;
}
const auto& forward_op() {
  static const auto found = find_op<NormForwardSchema>("torchkiln::norm_forward");
  return found;
}
const auto& add_forward_op() {
  static const auto found = find_op<AddNormForwardSchema>("torchkiln::add_norm_forward");
  return found;
}
const auto& backward_op() {
  static const auto found = find_op<NormBackwardSchema>("torchkiln::norm_backward");
  return found;
}

/// The dimensions begin <= d < end.
std::vector<int64_t> dims_between(int64_t begin, int64_t end) {
  std::vector<int64_t> dims(end - begin);
  std::iota(dims.begin(), dims.end(), begin);
  return dims;
}

struct Normalized {
  Tensor value;
  Tensor rstd;
};

Normalized normalized(const Tensor& z, at::IntArrayRef dims, double eps, bool centered) {
  const Tensor from = centered ? z - z.mean(dims, /*keepdim=*/true) : z;
  const Tensor rstd = ((from * from).mean(dims, /*keepdim=*/true) + eps).rsqrt();
  return {from * rstd, rstd};
}

/// The op in torch's own ops, in its own precision: for transforms that have no kernel here.
NormResult decomposed(const NormCall& call) {
  check_norm(call);
  const at::ScalarType dtype = call.x.scalar_type();
  const at::ScalarType compute = compute_dtype(dtype);
  const int64_t rank = call.x.dim();
  const auto dims = dims_between(rank - static_cast<int64_t>(call.shape.size()), rank);
  const Tensor sum = call.residual ? call.x + *call.residual : Tensor();
  const Tensor& z = call.residual ? sum : call.x;
  Tensor y = normalized(z.to(compute), dims, call.eps, call.centered).value;
  if (call.weight) y = y * (call.weight->to(compute) + call.offset);
  if (call.bias) y = y + call.bias->to(compute);
  return {y.to(dtype), sum};
}

/// What backward gets from autograd; what is not there is not defined.
struct Incoming {
  Tensor grad;
  Tensor grad_sum;
  Tensor z;
  Tensor stats;
  Tensor weight;
  double eps;
  double offset = 0;
  at::ScalarType weight_dtype;
  NormWanted wanted;
};

/// The gradients in torch's own ops, which can be differentiated again.
Gradients differentiable_gradients(const Incoming& in) {
  const at::ScalarType dtype = in.z.scalar_type();
  const at::ScalarType compute = compute_dtype(dtype);
  const int64_t first = in.stats.dim() - 1;
  const auto leading = dims_between(0, first);
  const auto dims = dims_between(first, in.z.dim());
  const bool centered = in.stats.sym_size(0) == 2;
  const auto [n, rstd] = normalized(in.z.to(compute), dims, in.eps, centered);
  const Tensor grad = in.grad.to(compute);
  const auto sum_of_rows = [&](const Tensor& terms) {
    return (leading.empty() ? terms : terms.sum(leading)).to(in.weight_dtype);
  };
  Tensor grad_z, grad_weight, grad_bias;
  if (in.wanted[0]) {
    const Tensor d = in.weight.defined() ? grad * (in.weight.to(compute) + in.offset) : grad;
    grad_z = d - n * (d * n).mean(dims, /*keepdim=*/true);
    if (centered) grad_z = grad_z - d.mean(dims, /*keepdim=*/true);
    grad_z = grad_z * rstd;
    if (in.grad_sum.defined()) grad_z = grad_z + in.grad_sum.to(compute);
    grad_z = grad_z.to(dtype);
  }
  if (in.wanted[1]) grad_weight = sum_of_rows(grad * n);
  if (in.wanted[2]) grad_bias = sum_of_rows(grad);
  return {grad_z, grad_weight, grad_bias};
}

Gradients gradients(const Incoming& in) {
  // Where the normed rows are not used, what is left is the sum.
  if (!in.grad.defined()) return {in.grad_sum, Tensor(), Tensor()};
  if (at::GradMode::is_enabled()) return differentiable_gradients(in);
  return backward_op().call(in.grad, maybe(in.grad_sum), in.z, in.stats, maybe(in.weight),
                            in.offset, in.weight_dtype, in.wanted);
}

/// Keeps x or the sum, the weight, and one or two numbers of each row.
struct NormFunction : torch::autograd::Function<NormFunction> {
  static variable_list forward(AutogradContext* context, const Tensor& x,
                               const MaybeTensor& residual, const MaybeTensor& weight,
                               const MaybeTensor& bias, const NormCall& call) {
    const at::AutoDispatchBelowADInplaceOrView below;
    Tensor y, sum, stats;
    if (residual) {
      std::tie(y, sum, stats) = add_forward_op().call(x, *residual, call.shape, weight, bias,
                                                      call.eps, call.offset, call.centered);
    } else {
      std::tie(y, stats) =
          forward_op().call(x, call.shape, weight, bias, call.eps, call.offset, call.centered);
    }
    context->set_materialize_grads(false);
    // No more than two for layer norm: at the third entry the table would have to grow, which takes
    // longer than they do.
    auto& data = context->saved_data;
    data["eps"] = call.eps;
    if (call.offset != 0) data["offset"] = call.offset;
    if (bias) data["bias_dtype"] = static_cast<int64_t>(bias->scalar_type());
    context->save_for_backward({residual ? sum : x, stats, weight ? *weight : Tensor()});
    if (residual) return {y, sum};
    return {y};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const variable_list saved = context->get_saved_variables();
    auto& data = context->saved_data;
    const bool has_residual = grads.size() == 2;
    Incoming in;
    in.grad = grads[0];
    if (has_residual) in.grad_sum = grads[1];
    in.z = saved[0];
    in.stats = saved[1];
    in.weight = saved[2];
    in.eps = data["eps"].toDouble();
    if (data.count("offset") > 0) in.offset = data["offset"].toDouble();
    const bool has_bias = data.count("bias_dtype") > 0;
    in.weight_dtype = in.weight.defined() ? in.weight.scalar_type()
                      : has_bias          ? static_cast<at::ScalarType>(data["bias_dtype"].toInt())
                                          : in.z.scalar_type();
    // Autograd numbers the tensors that there are.
    size_t input = 0;
    const auto next_is_wanted = [&](bool is_there) {
      return is_there && context->needs_input_grad(input++);
    };
    const bool wants_x = next_is_wanted(true);
    const bool wants_residual = next_is_wanted(has_residual);
    const bool wants_weight = next_is_wanted(in.weight.defined());
    const bool wants_bias = next_is_wanted(has_bias);
    in.wanted = {wants_x || wants_residual, wants_weight, wants_bias};
    const auto [grad_z, grad_weight, grad_bias] = gradients(in);
    return {wants_x ? grad_z : Tensor(), wants_residual ? grad_z : Tensor(),
            wants_weight ? grad_weight : Tensor(), wants_bias ? grad_bias : Tensor(), Tensor()};
  }
};

NormResult redispatch(const NormCall& call) {
  const MaybeTensor weight = maybe(call.weight);
  const MaybeTensor bias = maybe(call.bias);
  if (call.residual) {
    return call.centered ? add_layer_norm_op().call(call.x, *call.residual, call.shape, weight,
                                                    bias, call.eps)
                         : add_rms_norm_op().call(call.x, *call.residual, call.shape, weight,
                                                  call.eps, call.offset);
  }
  return {call.centered ? layer_norm_op().call(call.x, call.shape, weight, bias, call.eps)
                        : rms_norm_op().call(call.x, call.shape, weight, call.eps, call.offset),
          Tensor()};
}

NormResult autograd(const NormCall& call) {
  const Tensor& residual = call.residual ? *call.residual : call.x;
  const Tensor& weight = call.weight ? *call.weight : call.x;
  const Tensor& bias = call.bias ? *call.bias : call.x;
  if (is_transformed(call.x, residual, weight, bias)) return decomposed(call);
  if (needs_gradient(call.x, residual, weight, bias)) {
    const variable_list results = NormFunction::apply(call.x, maybe(call.residual),
                                                      maybe(call.weight), maybe(call.bias), call);
    return {results[0], call.residual ? results[1] : Tensor()};
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  return redispatch(call);
}

/// Half precision is computed in float32.
double default_eps(const Tensor& x) {
  return x.scalar_type() == at::kDouble ? std::numeric_limits<double>::epsilon()
                                        : std::numeric_limits<float>::epsilon();
}

// The four ops are one function.
using Run = NormResult (*)(const NormCall&);

template <Run run>
Tensor layer_norm_by(const Tensor& x, SymIntArrayRef shape, const MaybeTensor& weight,
                     const MaybeTensor& bias, double eps) {
  return std::get<0>(run({x, nullptr, shape, pointer_to(weight), pointer_to(bias), eps, 0, true}));
}
template <Run run>
Tensor rms_norm_by(const Tensor& x, SymIntArrayRef shape, const MaybeTensor& weight,
                   std::optional<double> eps, double offset) {
  return std::get<0>(run({x, nullptr, shape, pointer_to(weight), nullptr,
                          eps.value_or(default_eps(x)), offset, false}));
}
template <Run run>
NormResult add_layer_norm_by(const Tensor& x, const Tensor& residual, SymIntArrayRef shape,
                             const MaybeTensor& weight, const MaybeTensor& bias, double eps) {
  return run({x, &residual, shape, pointer_to(weight), pointer_to(bias), eps, 0, true});
}
template <Run run>
NormResult add_rms_norm_by(const Tensor& x, const Tensor& residual, SymIntArrayRef shape,
                           const MaybeTensor& weight, std::optional<double> eps, double offset) {
  return run({x, &residual, shape, pointer_to(weight), nullptr, eps.value_or(default_eps(x)),
              offset, false});
}

template <Run run>
void implement(torch::Library& m) {
  m.impl("layer_norm", TORCH_FN(layer_norm_by<run>));
  m.impl("rms_norm", TORCH_FN(rms_norm_by<run>));
  m.impl("add_layer_norm", TORCH_FN(add_layer_norm_by<run>));
  m.impl("add_rms_norm", TORCH_FN(add_rms_norm_by<run>));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def(
      "layer_norm(Tensor x, SymInt[] normalized_shape, Tensor? weight=None, Tensor? bias=None, "
      "float eps=1e-05) -> Tensor",
      tags);
  m.def(
      "rms_norm(Tensor x, SymInt[] normalized_shape, Tensor? weight=None, float? eps=None, *, "
      "float offset=0.0) -> Tensor",
      tags);
  m.def(
      "add_layer_norm(Tensor x, Tensor residual, SymInt[] normalized_shape, "
      "Tensor? weight=None, Tensor? bias=None, float eps=1e-05) -> (Tensor, Tensor)",
      tags);
  m.def(
      "add_rms_norm(Tensor x, Tensor residual, SymInt[] normalized_shape, Tensor? weight=None, "
      "float? eps=None, *, float offset=0.0) -> (Tensor, Tensor)",
      tags);
}

// All backends, so that what has no kernel (sparse, other devices) meets our checks and not a
// missing entry.
TORCH_LIBRARY_IMPL(torchkiln, CompositeExplicitAutograd, m) { implement<norm_real>(m); }
TORCH_LIBRARY_IMPL(torchkiln, Meta, m) { implement<norm_outputs>(m); }
TORCH_LIBRARY_IMPL(torchkiln, Autograd, m) { implement<autograd>(m); }
TORCH_LIBRARY_IMPL(torchkiln, FuncTorchBatched, m) { implement<decomposed>(m); }

}  // namespace torchkiln::norm_autograd_ops

namespace torchkiln {

at::Tensor layer_norm(const at::Tensor& x, c10::SymIntArrayRef normalized_shape,
                      const MaybeTensor& weight, const MaybeTensor& bias, double eps) {
  return norm_autograd_ops::layer_norm_op().call(x, normalized_shape, weight, bias, eps);
}

at::Tensor rms_norm(const at::Tensor& x, c10::SymIntArrayRef normalized_shape,
                    const MaybeTensor& weight, std::optional<double> eps, double offset) {
  return norm_autograd_ops::rms_norm_op().call(x, normalized_shape, weight, eps, offset);
}

NormResult add_layer_norm(const at::Tensor& x, const at::Tensor& residual,
                          c10::SymIntArrayRef normalized_shape, const MaybeTensor& weight,
                          const MaybeTensor& bias, double eps) {
  return norm_autograd_ops::add_layer_norm_op().call(x, residual, normalized_shape, weight, bias,
                                                     eps);
}

NormResult add_rms_norm(const at::Tensor& x, const at::Tensor& residual,
                        c10::SymIntArrayRef normalized_shape, const MaybeTensor& weight,
                        std::optional<double> eps, double offset) {
  return norm_autograd_ops::add_rms_norm_op().call(x, residual, normalized_shape, weight, eps,
                                                   offset);
}

}  // namespace torchkiln
