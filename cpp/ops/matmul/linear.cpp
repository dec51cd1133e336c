#include "matmul/linear.h"

#include "bias_act.h"
#include "detail/check_linear.h"
#include "detail/whole_tiles.h"
#include "matmul/kernel.h"
#include "matmul/padded.h"
#include "torchkiln/torch/empty.h"
#include "torchkiln/torch/ops.h"

namespace torchkiln::linear_ops {
namespace {

using at::Tensor;
using Two = std::tuple<Tensor, Tensor>;

constexpr const char* kName = "linear";

/// The tensor saved for the derivative of the activation. The output replaces a sign mask, unless a
/// residual was added to it.
Saved kept_by_linear(Activation act, bool has_residual) {
  const Saved saved = saved_by(act);
  if (saved == Saved::nothing) return saved;
  return saved == Saved::sign && !has_residual ? Saved::output : Saved::input;
}

/// Whether the product is saved without the bias. On the CPU torch's matrix product is rounded to
/// half precision, and the sum with a float32 bias would be rounded again. Our CUDA kernels round
/// once, behind the bias. A sign is that of the sum.
bool keeps_product(const Tensor& x, const MaybeTensor& bias, Activation act) {
  return x.is_cpu() && bias && bias->scalar_type() != x.scalar_type() &&
         saved_by(act) != Saved::sign;
}

Tensor checked_output(const Tensor& x, const Tensor& weight, const MaybeTensor& bias,
                      const MaybeTensor& residual) {
  check_linear(kName, x, weight, bias);
  c10::SymDimVector sizes(x.sym_sizes());
  sizes.back() = weight.sym_size(0);
  Tensor out = empty_of(sizes, x);
  if (residual) {
    check_tensors(kName, {{"x", x}, {"residual", *residual}});
    check_same_dtype(kName, "residual", *residual, "x", x);
    check_same_shape(kName, "residual", *residual, "the output", out);
  }
  return out;
}

/// to = x weight^T * scale + bias, for matrices of any strides.
void run_product(const Tensor& x, const Tensor& weight, const MaybeTensor& bias, double scale,
                 Tensor to) {
  const auto [rows, columns] = in_whole_tiles(x, weight.t());
  if (bias && bias->scalar_type() == to.scalar_type()) {
    at::addmm_out(to, *bias, rows, columns, 1, scale);
    return;
  }
  to.addmm_(rows, columns, /*beta=*/0, /*alpha=*/scale);
  if (bias) to.copy_(bias_act(to, *bias, 1.0, "none"));
}

/// to = x weight^T * scale + bias with torch's matrix product.
void run_preactivation(const Tensor& x, const Tensor& weight, const MaybeTensor& bias, double scale,
                       Tensor to) {
  if (!gains_from_padding(x, weight, to)) {
    run_product(x, weight, bias, scale, to);
    return;
  }
  trace::note("copied: to sizes of multiples of 16 bytes, whose product takes less time");
  const PaddedSizes sizes(x, weight);
  const bool adds = bias && bias->scalar_type() == to.scalar_type();
  const bool is_exact = sizes.m == to.size(0) && sizes.n == to.size(1);
  const Tensor wide = is_exact ? to : at::empty({sizes.m, sizes.n}, to.options());
  const MaybeTensor shift =
      adds ? MaybeTensor(at::constant_pad_nd(*bias, {0, sizes.n - bias->size(0)})) : std::nullopt;
  run_product(padded(kName, x, sizes.m, sizes.k), padded(kName, weight, sizes.n, sizes.k), shift,
              scale, wide);
  const Tensor own = wide.narrow(0, 0, to.size(0)).narrow(1, 0, to.size(1));
  if (bias && !adds) {
    to.copy_(bias_act(own, *bias, 1.0, "none"));
  } else if (!is_exact) {
    copy_rows(kName, own, to);
  }
}

/// The op with torch's matrix product. `preactivation` is defined if it is saved. The relu that
/// cuBLASLt fuses is not used: it turns NaN into 0.
void run_library(const Tensor& x, const Tensor& weight, const MaybeTensor& bias, Activation act,
                 double scale, const MaybeTensor& residual, const Tensor& out,
                 const Tensor& preactivation) {
  Tensor rows = as_matrix(out);
  if (keeps_product(x, bias, act)) {
    const Tensor& product = preactivation.defined() ? preactivation : out;
    run_preactivation(x, weight, std::nullopt, scale, as_matrix(product));
    out.copy_(bias_act(product, *bias, 1.0, name_of(act)));
  } else if (act == kActivation<None>) {
    run_preactivation(x, weight, bias, scale, rows);
  } else {
    const Tensor& from = preactivation.defined() ? preactivation : out;
    run_preactivation(x, weight, bias, scale, as_matrix(from));
    run_activation(kName, act, out, from);
  }
  if (residual) out.add_(*residual);
}

/// Writes the output and, if defined, the preactivation.
void run(const Tensor& x, const Tensor& weight, const MaybeTensor& bias, Activation act,
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
  arguments.activation = act;
  arguments.scale = scale;
  if (!run_own_kernel(kName, arguments, out))
    run_library(rows, weight, shift, act, scale, more, out, preactivation);
}

/// The op with torch's own ops; `product` is the dtype of the matrix product.
Tensor composite_in(at::ScalarType product, const Tensor& x, const Tensor& weight,
                    const MaybeTensor& bias, Activation act, double scale,
                    const MaybeTensor& residual) {
  checked_output(x, weight, bias, residual);
  const at::ScalarType compute = compute_dtype(x.scalar_type());
  const bool is_plain = scale == 1 && bias && bias->scalar_type() == product;
  Tensor z =
      at::linear(x.to(product), weight.to(product), is_plain ? bias : std::nullopt).to(compute);
  if (scale != 1) z = z * scale;
  if (bias && !is_plain) z = z + bias->to(compute);
  z = composite_activation(act, z);
  if (residual) z = z + residual->to(compute);
  return z.to(x.scalar_type());
}

}  // namespace

Two Forward::meta(const Tensor& x, const Tensor& weight, const MaybeTensor& bias, Activation act,
                  double, const MaybeTensor& residual) {
  Tensor out = checked_output(x, weight, bias, residual);
  const bool is_kept = kept_by_linear(act, residual.has_value()) == Saved::input;
  Tensor preactivation = is_kept ? at::empty_like(out) : no_output(out);
  return {std::move(out), std::move(preactivation)};
}

Two Forward::kernel(const Tensor& x, const Tensor& weight, const MaybeTensor& bias, Activation act,
                    double scale, const MaybeTensor& residual) {
  auto [out, preactivation] = meta(x, weight, bias, act, scale, residual);
  const bool is_kept = kept_by_linear(act, residual.has_value()) == Saved::input;
  run(x, weight, bias, act, scale, residual, out, is_kept ? preactivation : Tensor());
  return {std::move(out), std::move(preactivation)};
}

namespace {

/// The gradient of the preactivation and, if the same pass computes it, of the bias. `missing` is a
/// bias that `kept` does not include.
Two pass_activation(const Incoming& in, const Tensor& kept, const MaybeTensor& missing,
                    Activation act, const std::optional<at::ScalarType>& bias_dtype,
                    bool wants_bias) {
  if (act == kActivation<None>) return {in[0], Tensor()};
  if (saved_by(act) == Saved::sign) return {call_below<ActivationBackward>(in[0], kept, act), {}};
  auto [passed, grad_bias] = call_below<bias_act_ops::Backward>(
      in[0], kept, missing, 1.0, act, bias_dtype.value_or(in[0].scalar_type()),
      bias_act_ops::Backward::Wanted{true, wants_bias});
  return {passed, wants_bias ? grad_bias : Tensor()};
}

struct Op {
  static constexpr const char* kSchema =
      "torchkiln::linear(Tensor x, Tensor weight, Tensor? bias=None, str act='none', "
      "float scale=1.0, Tensor? residual=None) -> Tensor";

  static Tensor meta(const Tensor& x, const Tensor& weight, const MaybeTensor& bias, Activation,
                     double, const MaybeTensor& residual) {
    return checked_output(x, weight, bias, residual);
  }

  static Tensor kernel(const Tensor& x, const Tensor& weight, const MaybeTensor& bias,
                       Activation act, double scale, const MaybeTensor& residual) {
    Tensor out = checked_output(x, weight, bias, residual);
    run(x, weight, bias, act, scale, residual, out, Tensor());
    return out;
  }

  static Tensor composite(const Tensor& x, const Tensor& weight, const MaybeTensor& bias,
                          Activation act, double scale, const MaybeTensor& residual) {
    return composite_in(x.scalar_type(), x, weight, bias, act, scale, residual);
  }

  /// vmap splits off the bias, after a product rounded to x's dtype: so the product is float32
  /// here.
  static Tensor batched(const Tensor& x, const Tensor& weight, const MaybeTensor& bias,
                        Activation act, double scale, const MaybeTensor& residual) {
    return composite_in(compute_dtype(x.scalar_type()), x, weight, bias, act, scale, residual);
  }

  static Tensor recorded(const Below& below, const Tensor& x, const Tensor& weight,
                         const MaybeTensor& bias, Activation act, double scale,
                         const MaybeTensor& residual) {
    const Saved kind = kept_by_linear(act, residual.has_value());
    Tensor out, kept;
    if (kind == Saved::input) {
      std::tie(out, kept) = below.call<Forward>(x, weight, bias, act, scale, residual);
    } else {
      out = below.call<Op>(x, weight, bias, act, scale, residual);
      if (kind == Saved::output) kept = out;
    }
    const Tensor shift = tensor_or_undefined(bias), more = tensor_or_undefined(residual);
    const auto bias_dtype = bias ? std::optional(bias->scalar_type()) : std::nullopt;
    return record(
        kName, {x, weight, shift, more}, out, keep(x, weight, shift, kept),
        [=](const Incoming& in, const Kept<4>& saved) {
          const auto& [x, weight, bias, kept] = saved;
          if (act != kActivation<None> && in.needs_composite()) {
            variable_list found =
                composite_gradients(in, std::array{x, weight, bias}, [&](const auto& inputs) {
                  return composite(inputs[0], inputs[1], maybe(inputs[2]), act, scale,
                                   std::nullopt);
                });
            found.push_back(in[0]);
            return found;
          }
          Tensor grad_x, grad_weight, grad_bias;
          if (in.wants(0) || in.wants(1) || in.wants(2)) {
            const MaybeTensor shift = maybe(bias);
            const auto [passed, passed_bias] =
                pass_activation(in, kept, keeps_product(x, shift, act) ? shift : std::nullopt, act,
                                bias_dtype, in.wants(2));
            const Tensor rows = as_matrix(passed);
            if (in.wants(0)) grad_x = linear(passed, weight.t(), std::nullopt, "none", scale);
            if (in.wants(1))
              grad_weight = linear(rows.t(), as_matrix(x).t(), std::nullopt, "none", scale);
            grad_bias = passed_bias;
            if (in.wants(2) && !grad_bias.defined()) {
              constexpr int64_t kOverRows[] = {0};
              grad_bias = torchkiln::sum(rows, at::IntArrayRef(kOverRows), false, bias_dtype);
            }
          }
          return variable_list{grad_x, grad_weight, grad_bias, in[0]};
        });
  }

  /// Casts x, weight and residual to the autocast dtype, as torch does. A float32 bias is not cast.
  static Tensor autocast(const Autocast& cast, const Tensor& x, const Tensor& weight,
                         const MaybeTensor& bias, Activation act, double scale,
                         const MaybeTensor& residual) {
    check_tensors(kName, {{"x", x}, {"weight", weight}});
    const bool reads_bias = !bias || bias->scalar_type() == at::kFloat;
    return call<Op>(cast(x), cast(weight), reads_bias ? bias : cast(bias), act, scale,
                    cast(residual));
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) { define<Forward, Op>(m); }

}  // namespace torchkiln::linear_ops

namespace torchkiln {

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const MaybeTensor& bias,
                  c10::string_view act, double scale, const MaybeTensor& residual) {
  return call<linear_ops::Op>(x, weight, bias, find_activation("linear", act), scale, residual);
}

}  // namespace torchkiln
