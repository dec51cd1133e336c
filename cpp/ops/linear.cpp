#include <ATen/ATen.h>
#include <torch/library.h>

#include "activations.h"
#include "linear.h"
#include "matmul.h"
#include "torchkiln/checks.h"
#include "torchkiln/ops.h"

namespace torchkiln::linear_ops {
namespace {

using at::Tensor;
using c10::string_view;
using Two = std::tuple<Tensor, Tensor>;

constexpr const char* kForwardOp = "linear_forward";

void check_like_x(const char* name, const Tensor& tensor, const Tensor& x) {
  check_tensor(kLinear, name, tensor);
  check_same_device(kLinear, name, tensor, "x", x);
  TORCH_CHECK(tensor.scalar_type() == x.scalar_type(), "torchkiln.", kLinear, ": ", name,
              ": got dtype ", dtype_name(tensor.scalar_type()), ", expected ",
              dtype_name(x.scalar_type()), ", the dtype of x");
}

void check_bias(const Tensor& bias, const Tensor& x, const Tensor& weight) {
  check_tensor(kLinear, "bias", bias);
  check_same_device(kLinear, "bias", bias, "x", x);
  const at::ScalarType dtype = x.scalar_type();
  TORCH_CHECK(bias.scalar_type() == dtype || (is_half(dtype) && bias.scalar_type() == at::kFloat),
              "torchkiln.", kLinear, ": bias: got dtype ", dtype_name(bias.scalar_type()),
              ", expected ", dtype_name(dtype), ", the dtype of x",
              is_half(dtype) ? ", or float32" : "");
  TORCH_CHECK(bias.dim() == 1 && bias.sym_size(0) == weight.sym_size(0), "torchkiln.", kLinear,
              ": bias: got shape ", bias.sym_sizes(), ", expected [", weight.sym_size(0),
              "], the first size of weight");
}

}  // namespace

}  // namespace torchkiln::linear_ops

namespace torchkiln {

c10::SymDimVector linear_sizes(const at::Tensor& x, const at::Tensor& weight,
                               const MaybeTensor& bias, c10::string_view act,
                               const MaybeTensor& residual) {
  check_tensor(kLinear, "x", x);
  check_dtype(kLinear, "x", x);
  linear_ops::check_like_x("weight", weight, x);
  TORCH_CHECK(x.dim() >= 1, "torchkiln.", kLinear,
              ": x: got a 0-dimensional tensor, expected at least 1 dimension");
  TORCH_CHECK(weight.dim() == 2, "torchkiln.", kLinear, ": weight: got ", weight.dim(),
              " dimensions (shape ", weight.sym_sizes(), "), expected 2");
  TORCH_CHECK(weight.sym_size(1) == x.sym_size(-1), "torchkiln.", kLinear, ": weight: got shape ",
              weight.sym_sizes(), ", expected ", x.sym_size(-1),
              " as the second size, the last size of x");
  if (bias) linear_ops::check_bias(*bias, x, weight);
  find_activation(kLinear, act);
  c10::SymDimVector sizes(x.sym_sizes());
  sizes.back() = weight.sym_size(0);
  if (residual) {
    linear_ops::check_like_x("residual", *residual, x);
    TORCH_CHECK(residual->sym_sizes().equals(sizes), "torchkiln.", kLinear,
                ": residual: got shape ", residual->sym_sizes(), ", expected ",
                c10::SymIntArrayRef(sizes), ", the shape of the output");
  }
  return sizes;
}

}  // namespace torchkiln

namespace torchkiln::linear_ops {
namespace {

Tensor output(const Tensor& x, const Tensor& weight, const MaybeTensor& bias, string_view act,
              double, const MaybeTensor& residual) {
  const c10::SymDimVector sizes = linear_sizes(x, weight, bias, act, residual);
  return at::empty_symint(sizes, x.options().memory_format(at::MemoryFormat::Contiguous));
}

/// The output and the preactivation, which has no elements where backward needs none.
Two outputs(const Tensor& x, const Tensor& weight, const MaybeTensor& bias, string_view act,
            double scale, const MaybeTensor& residual) {
  Tensor out = output(x, weight, bias, act, scale, residual);
  const Kept kept = kept_by_linear(find_activation(kLinear, act), residual.has_value());
  Tensor preactivation =
      kept == Kept::preactivation ? at::empty_like(out) : at::empty({0}, out.options());
  return {std::move(out), std::move(preactivation)};
}

/// x weight^T * scale + bias by torch's product, into `to`; all are matrices.
void run_preactivation(const Tensor& x, const Tensor& weight, const MaybeTensor& bias, double scale,
                       Tensor to) {
  const Tensor columns = weight.t();
  if (bias && bias->scalar_type() == to.scalar_type()) {
    at::addmm_out(to, *bias, x, columns, 1, scale);
    return;
  }
  to.addmm_(x, columns, /*beta=*/0, /*alpha=*/scale);
  if (bias) to.copy_(bias_act(to, *bias, 1.0, "none"));
}

/// The same and what follows, from torch's product; `out` and `preactivation` are memory for it.
/// cuBLASLt fuses relu with a bias.
void run_library(const Tensor& x, const Tensor& weight, const MaybeTensor& bias,
                 Activation activation, double scale, const MaybeTensor& residual,
                 const Tensor& out, const Tensor& preactivation) {
  const bool is_kept = preactivation.defined();
  Tensor rows = as_matrix(out);
  // Of no terms ATen gives the bias alone.
  if (out.is_cuda() && activation == kActivation<Relu> && scale == 1 && !is_kept && bias &&
      bias->scalar_type() == out.scalar_type() && x.sym_size(-1) > 0) {
    at::_addmm_activation_out(rows, *bias, x, weight.t());
  } else if (activation == kActivation<None>) {
    run_preactivation(x, weight, bias, scale, rows);
  } else {
    const Tensor& from = is_kept ? preactivation : out;
    run_preactivation(x, weight, bias, scale, as_matrix(from));
    run_activation(kLinear, activation, out, from, /*overlaps=*/false);
  }
  if (residual) out.add_(*residual);
}

/// Writes the output, and the preactivation where it is defined.
void run(const Tensor& x, const Tensor& weight, const MaybeTensor& bias, string_view act,
         double scale, const MaybeTensor& residual, const Tensor& out,
         const Tensor& preactivation) {
  if (out.numel() == 0) return;
  const Tensor rows = as_matrix(x);
  const MaybeTensor shift = bias ? MaybeTensor(bias->contiguous()) : std::nullopt;
  const MaybeTensor more = residual ? MaybeTensor(residual->contiguous()) : std::nullopt;
  Matmul arguments = describe_linear(rows, weight, out);
  if (shift) {
    arguments.bias = shift->const_data_ptr();
    arguments.bias_dtype = dtype_of(*shift);
  }
  if (more) arguments.residual = more->const_data_ptr();
  if (preactivation.defined()) arguments.preactivation = preactivation.data_ptr();
  arguments.activation = find_activation(kLinear, act);
  arguments.scale = scale;
  if (!run_own_kernel(kLinear, arguments, out))
    run_library(rows, weight, shift, arguments.activation, scale, more, out, preactivation);
}

Tensor real(const Tensor& x, const Tensor& weight, const MaybeTensor& bias, string_view act,
            double scale, const MaybeTensor& residual) {
  Tensor out = output(x, weight, bias, act, scale, residual);
  run(x, weight, bias, act, scale, residual, out, Tensor());
  return out;
}

Two forward_real(const Tensor& x, const Tensor& weight, const MaybeTensor& bias, string_view act,
                 double scale, const MaybeTensor& residual) {
  auto [out, preactivation] = outputs(x, weight, bias, act, scale, residual);
  const Kept kept = kept_by_linear(find_activation(kLinear, act), residual.has_value());
  run(x, weight, bias, act, scale, residual, out,
      kept == Kept::preactivation ? preactivation : Tensor());
  return {std::move(out), std::move(preactivation)};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) {
  m.def(
      "linear(Tensor x, Tensor weight, Tensor? bias=None, str act='none', float scale=1.0, "
      "Tensor? residual=None) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "linear_forward(Tensor x, Tensor weight, Tensor? bias, str act, float scale, "
      "Tensor? residual) -> (Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}

// All backends, so that what has no kernel (sparse, other devices) meets our checks and not a
// missing entry.
TORCH_LIBRARY_IMPL(torchkiln, CompositeExplicitAutograd, m) {
  m.impl(kLinear, TORCH_FN(real));
  m.impl(kForwardOp, TORCH_FN(forward_real));
}
TORCH_LIBRARY_IMPL(torchkiln, Meta, m) {
  m.impl(kLinear, TORCH_FN(output));
  m.impl(kForwardOp, TORCH_FN(outputs));
}

}  // namespace torchkiln::linear_ops
