// Gated norms composed of two other kernels: swiglu for the gate, rms_norm for the norm.
// Intermediate results have the compute dtype, so that the result is rounded once.

#include "detail/column_sum.h"
#include "gated.h"
#include "gated_norm/gated_norm.h"
#include "norm/norm.h"
#include "torchkiln/torch/checks.h"
#include "torchkiln/torch/ops.h"

namespace torchkiln::gated_norm_ops {
namespace {

constexpr Activation kSilu = kActivation<Silu>;

/// A tensor as [tokens, groups, columns]; rstd has one number for each group of a token.
Tensor as_groups(const Tensor& tensor, const Tensor& rstd) {
  const int64_t groups = rstd.size(-1);
  const int64_t tokens = rstd.numel() / groups;
  return tensor.reshape({tokens, groups, tensor.numel() / (tokens * groups)});
}

/// tensor * (weight + offset)
Tensor scaled(const Tensor& tensor, const MaybeTensor& weight, double offset) {
  return weight ? tensor * (weight->to(tensor.scalar_type()) + offset) : tensor;
}

}  // namespace

Two composed_forward(const Call& call) {
  const at::IntArrayRef leading =
      call.x->sizes().slice(0, call.x->dim() - static_cast<int64_t>(call.shape.size()));
  at::DimVector sizes(leading);
  sizes.push_back(call.groups);
  const int64_t tokens = c10::multiply_integers(leading);
  const int64_t columns = call.x->numel() / (tokens * call.groups);
  const Tensor x = call.x->to(compute_dtype(call.x->scalar_type()));
  const Tensor z = call.gate_first ? swiglu(call.gate, x) : x;
  const Tensor rows = z.reshape({tokens, call.groups, columns});
  const c10::SymInt shape[] = {columns};
  norm_ops::Forward::Arguments norm{};
  norm.x = rows;
  norm.shape = shape;
  norm.eps = call.eps;
  const auto [n, stats] = norm_ops::Forward::kernel(norm);
  Tensor y = scaled(n.view(x.sizes()), call.weight, call.offset);
  if (!call.gate_first) y = swiglu(call.gate, y);
  return {y.to(call.x->scalar_type()), stats.view(sizes)};
}

Three composed_backward(const Backward::Arguments& call) {
  const Tensor &grad = call.grad, &x = call.x, &gate = call.gate;
  const Tensor rstd = call.rstd->contiguous();
  const MaybeTensor& weight = call.weight;
  const bool gate_first = call.gate_first;
  const double offset = call.offset;
  const at::ScalarType dtype = grad.scalar_type();
  const at::ScalarType compute = compute_dtype(dtype);
  const Tensor wide = x.to(compute);
  const Tensor z = as_groups(gate_first ? swiglu(gate, wide) : wide, rstd);
  const Tensor n = (z * as_groups(rstd, rstd)).view(x.sizes());
  Tensor through = grad.to(compute);  // the gradient of n times the weight
  Tensor grad_gate;
  if (!gate_first) {
    std::tie(grad_gate, through) =
        gated_ops::GatedBackward::kernel(through, gate, scaled(n, weight, offset), kSilu);
  }
  Tensor grad_x = std::get<0>(call_below<norm_ops::Backward>(
      as_groups(scaled(through, weight, offset), rstd), MaybeTensor(), z,
      rstd.view({1, z.size(0), z.size(1)}), MaybeTensor(), /*offset=*/0.0, compute,
      norm_ops::Backward::Wanted{true, false, false}));
  grad_x = grad_x.view(x.sizes());
  if (gate_first)
    std::tie(grad_gate, grad_x) = gated_ops::GatedBackward::kernel(grad_x, gate, wide, kSilu);
  Tensor grad_weight;
  if (weight) grad_weight = sum_to_last(through * n, weight->dim(), weight->scalar_type());
  return {grad_x.to(dtype), grad_gate.to(dtype), grad_weight};
}

}  // namespace torchkiln::gated_norm_ops
