// The op linear and its derivatives: a product with scale, bias, activation and residual in its
// epilogue, computed by our own kernel if that is faster (kernel.h), else by torch's product.
// mlp.cpp has two layers around an activation or a gate, matmul.cpp the product alone.

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

/// Whether the saved preactivation excludes the bias. On the CPU torch rounds a product to half
/// precision, and its sum with a float32 bias would be rounded again. Our CUDA kernels round once,
/// after adding the bias. A saved sign is always that of the sum.
bool keeps_product(const Tensor& x, const MaybeTensor& bias, Activation act) {
  return x.is_cpu() && bias && bias->scalar_type() != x.scalar_type() &&
         saved_by(act) != Saved::sign;
}

Tensor checked_output(const Call& call) {
  check_linear(kName, call.x, call.weight, call.bias);
  c10::SymDimVector sizes(call.x->sym_sizes());
  sizes.back() = call.weight->sym_size(0);
  Tensor out = empty_of(sizes, call.x);
  if (call.residual) {
    check_tensors(kName, {{"x", call.x}, {"residual", *call.residual}});
    check_same_dtype(kName, "residual", *call.residual, "x", call.x);
    check_same_shape(kName, "residual", *call.residual, "the output", out);
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
  if (bias) to.copy_(bias_act(to, *bias, {1.0, "none"}));
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
    to.copy_(bias_act(own, *bias, {1.0, "none"}));
  } else if (!is_exact) {
    copy_rows(kName, own, to);
  }
}

/// The op with torch's matrix product; x is a matrix. Writes `preactivation` if it is defined.
/// Does not use cuBLASLt's fused relu, which turns NaN into 0.
void run_library(const Call& call, const Tensor& out, const Tensor& preactivation) {
  const Tensor &x = call.x, &weight = call.weight;
  if (keeps_product(x, call.bias, call.act)) {
    const Tensor& product = preactivation.defined() ? preactivation : out;
    run_preactivation(x, weight, std::nullopt, call.scale, as_matrix(product));
    out.copy_(bias_act(product, *call.bias, {1.0, name_of(call.act)}));
  } else if (call.act == kActivation<None>) {
    run_preactivation(x, weight, call.bias, call.scale, as_matrix(out));
  } else {
    const Tensor& from = preactivation.defined() ? preactivation : out;
    run_preactivation(x, weight, call.bias, call.scale, as_matrix(from));
    run_activation(kName, call.act, out, from);
  }
  if (call.residual) out.add_(*call.residual);
}

/// Writes the output and, if defined, the preactivation.
void run(Call call, const Tensor& out, const Tensor& preactivation) {
  if (out.numel() == 0) return;
  const auto contiguous = [](const MaybeTensor& tensor) {
    return tensor ? MaybeTensor(tensor->contiguous()) : std::nullopt;
  };
  const Tensor rows = as_matrix(call.x);
  const MaybeTensor bias = contiguous(call.bias), residual = contiguous(call.residual);
  call.x = rows;
  call.bias = bias;
  call.residual = residual;
  Matmul arguments = describe_linear(rows, call.weight, out);
  if (bias) {
    arguments.bias = bias->const_data_ptr();
    arguments.bias_dtype = dtype_of(*bias);
  }
  if (residual) arguments.residual = residual->const_data_ptr();
  if (preactivation.defined()) arguments.preactivation = preactivation.data_ptr();
  arguments.activation = call.act;
  arguments.scale = call.scale;
  if (!run_own_kernel(kName, arguments, out)) run_library(call, out, preactivation);
}

/// The op with torch's own ops; `product` is the dtype of the matrix product.
Tensor composite_in(at::ScalarType product, const Call& call) {
  checked_output(call);
  const at::ScalarType dtype = call.x->scalar_type(), compute = compute_dtype(dtype);
  const MaybeTensor& bias = call.bias;
  const bool is_plain = call.scale == 1 && bias && bias->scalar_type() == product;
  Tensor z =
      at::linear(call.x->to(product), call.weight->to(product), is_plain ? bias : std::nullopt)
          .to(compute);
  if (call.scale != 1) z = z * call.scale;
  if (bias && !is_plain) z = z + bias->to(compute);
  z = composite_activation(call.act, z);
  if (call.residual) z = z + call.residual->to(compute);
  return z.to(dtype);
}

}  // namespace

Two Forward::meta(const Call& call) {
  Tensor out = checked_output(call);
  const bool is_kept = kept_by_linear(call.act, call.residual.has_value()) == Saved::input;
  Tensor preactivation = is_kept ? at::empty_like(out) : no_output(out);
  return {std::move(out), std::move(preactivation)};
}

Two Forward::kernel(const Call& call) {
  auto [out, preactivation] = meta(call);
  const bool is_kept = kept_by_linear(call.act, call.residual.has_value()) == Saved::input;
  run(call, out, is_kept ? preactivation : Tensor());
  return {std::move(out), std::move(preactivation)};
}

namespace {

/// The gradient of the preactivation and, if the same pass computes it, of the bias. `missing`: a
/// bias that `kept` does not include yet.
Two pass_activation(const Incoming& in, const Tensor& kept, const MaybeTensor& missing,
                    Activation act, const std::optional<at::ScalarType>& bias_dtype,
                    bool wants_bias) {
  if (act == kActivation<None>) return {in[0], Tensor()};
  const Saved kind = saved_by(act);
  if (kind == Saved::sign || (kind == Saved::input && !wants_bias && !missing))
    return {call_below<ActivationBackward>(in[0], kept, act), {}};
  auto [passed, grad_bias] = call_below<bias_act_ops::Backward>(
      in[0], kept, missing, 1.0, act, bias_dtype.value_or(in[0].scalar_type()),
      bias_act_ops::Backward::Wanted{true, wants_bias});
  return {passed, wants_bias ? grad_bias : Tensor()};
}

struct Op {
  static constexpr bool kFlexibleLayout = true;
  static constexpr const char* kSchema =
      // The residual may be positional, without `*`: DTensor distributes only positional tensors.
      "torchkiln::linear(Tensor x, Tensor weight, Tensor? bias=None, str act='none', "
      "float scale=1.0, Tensor? residual=None) -> Tensor";

  static Tensor meta(const Call& call) { return checked_output(call); }

  static Tensor kernel(const Call& call) {
    Tensor out = checked_output(call);
    run(call, out, Tensor());
    return out;
  }

  static Tensor composite(const Call& call) { return composite_in(call.x->scalar_type(), call); }

  /// The product is float32, because vmap adds the bias in a separate op: a product in x's dtype
  /// would be rounded before the sum.
  static Tensor batched(const Call& call) {
    return composite_in(compute_dtype(call.x->scalar_type()), call);
  }

  static Tensor recorded(const Below& below, const Call& call) {
    const Tensor &x = call.x, &weight = call.weight;
    const Activation act = call.act;
    const double scale = call.scale;
    const Saved kind = kept_by_linear(act, call.residual.has_value());
    Tensor out, kept;
    if (kind == Saved::input) {
      std::tie(out, kept) = below.call<Forward>(call);
    } else {
      out = below.call<Op>(call);
      if (kind == Saved::output) kept = out;
    }
    const Tensor shift = tensor_or_undefined(call.bias), more = tensor_or_undefined(call.residual);
    const auto bias_dtype = call.bias ? std::optional(call.bias->scalar_type()) : std::nullopt;
    return record(
        kName, {x, weight, shift, more}, out, keep(x, weight, shift, kept),
        [=](const Incoming& in, const Kept<4>& saved) {
          const auto& [x, weight, bias, kept] = saved;
          if (act != kActivation<None> && in.needs_composite()) {
            variable_list found =
                composite_gradients(in, std::array{x, weight, bias}, [&](const auto& inputs) {
                  return call_composite<Op>(inputs[0], inputs[1], maybe(inputs[2]), act, scale,
                                            MaybeTensor());
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
            if (in.wants(0)) grad_x = linear(passed, weight.t(), std::nullopt, {"none", scale});
            if (in.wants(1))
              grad_weight = linear(rows.t(), as_matrix(x).t(), std::nullopt, {"none", scale});
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
  static Tensor autocast(const Autocast& cast, const Call& call) {
    check_tensors(kName, {{"x", call.x}, {"weight", call.weight}});
    const bool reads_bias = !call.bias || call.bias->scalar_type() == at::kFloat;
    const MaybeTensor& bias = call.bias;
    return torchkiln::call<Op>(cast(*call.x), cast(*call.weight), reads_bias ? bias : cast(bias),
                               call.act, call.scale, cast(call.residual));
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) { define<Forward, Op>(m); }

}  // namespace torchkiln::linear_ops

namespace torchkiln {

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const MaybeTensor& bias,
                  const LinearOptions& options) {
  return call<linear_ops::Op>(x, weight, bias, options);
}

}  // namespace torchkiln
