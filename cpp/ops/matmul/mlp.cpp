// Two linear layers around an activation or a gate, as one op of autograd. It saves one tensor of
// the hidden size, or none, whereas a chain of ops saves every intermediate result.

#include <torch/csrc/autograd/graph_task.h>

#include "bias_act.h"
#include "detail/check_linear.h"
#include "gated.h"
#include "matmul/gate.h"
#include "matmul/kernel.h"
#include "matmul/linear.h"
#include "torchkiln/torch/empty.h"
#include "torchkiln/torch/ops.h"

namespace torchkiln {

/// The tensor of the hidden layer that is saved for backward: the argument of the activation, or
/// none.
enum class HiddenSave { preact, none };

template <>
struct InSchema<HiddenSave> {
  using Type = c10::string_view;
  static HiddenSave read(const char* op, c10::string_view name) {
    if (name == "preact") return HiddenSave::preact;
    TORCH_CHECK_VALUE(name == "none", "torchkiln.", op, ": save: got '", name,
                      "', expected one of preact, none");
    return HiddenSave::none;
  }
  static c10::string_view write(HiddenSave save) {
    return save == HiddenSave::preact ? "preact" : "none";
  }
};

}  // namespace torchkiln

namespace torchkiln::mlp_ops {
namespace {

using at::Tensor;
using Two = std::tuple<Tensor, Tensor>;

/// The results of the backward of an activation or a gate.
struct Passed {
  Tensor grad;    // gradient of the argument
  Tensor bias;    // the sum of grad over the rows, if the same pass computes it
  Tensor output;  // output of the activation, if wanted
};

/// The results that the backward of a hidden layer has to compute.
struct Wanted {
  bool bias;
  bool output;
  bool overwrites;  // the results may overwrite the arguments
  bool is_plain;    // ops run without torch's dispatcher
};

// Gradients of a linear layer from the gradient of its output, as rows.
Tensor input_gradient(const Tensor& grad, const Tensor& weight) {
  return torchkiln::linear(grad, weight.t());
}
Tensor weight_gradient(const Tensor& grad, const Tensor& x) {
  return torchkiln::linear(grad.t(), x.t());
}
Tensor bias_gradient(const Tensor& grad) {
  constexpr int64_t kOverRows[] = {0};
  return torchkiln::sum(grad, at::IntArrayRef(kOverRows));
}

/// The hidden layer of mlp().
struct Plain {
  using Act = Activation;
  static constexpr const char* kName = "mlp";
  static constexpr const char* kUpWeight = "up_weight";
  static constexpr const char* kUpBias = "up_bias";
  static constexpr const char* kHidden = "the first size of up_weight";
  static constexpr int64_t kHalves = 1;

  /// Whether the derivative needs the argument of the activation. If not, the output is enough.
  static bool needs_input(Act act) {
    return saved_by(act) == Saved::input || saved_by(act) == Saved::output;
  }
  /// Returns the output, and the tensor that its derivative needs.
  static Two recorded(const Tensor& x, const Tensor& weight, const MaybeTensor& bias, Act act) {
    auto [out, kept] = call_below<linear_ops::Forward>(x, weight, bias, act, 1.0, MaybeTensor());
    return {out, needs_input(act) ? kept : out};
  }
  static Tensor forward(const Tensor& x, const Tensor& weight, const MaybeTensor& bias, Act act) {
    return torchkiln::linear(x, weight, bias, {name_of(act)});
  }
  /// The results of recorded(), computed again in backward. The output may be undefined: backward()
  /// or output() then computes it.
  static Two again(const Tensor& x, const Tensor& weight, const MaybeTensor& bias, Act act) {
    return recorded(x, weight, bias, act);
  }
  /// The output of the activation, from the saved tensor: its argument or, if the derivative does
  /// not need that, the output itself.
  static Tensor output(const Tensor& kept, Act act) {
    return needs_input(act) ? activation(kept, name_of(act)) : kept;
  }
  static Passed backward(const Tensor& rows, const Tensor& down, const Tensor& kept, Act act,
                         const Wanted& wanted) {
    const Tensor grad = input_gradient(rows, down);
    Passed found;
    constexpr int64_t kMany = 1 << 18;  // reading more takes longer than a launch
    if (wanted.output && wanted.is_plain && !wanted.bias && needs_input(act) && grad.is_cuda() &&
        grad.numel() >= kMany) {
      found.grad = empty_in_layout_of(kept);
      write_gradient_and_output(grad, kept, act, found.grad);
      found.output = grad;
      return found;
    }
    if (wanted.output) found.output = output(kept, act);
    if (act == kActivation<None>) {
      found.grad = grad;
    } else if (saved_by(act) == Saved::sign || (saved_by(act) == Saved::input && !wanted.bias)) {
      found.grad = call_below<ActivationBackward>(grad, kept, act);
    } else {
      std::tie(found.grad, found.bias) = call_below<bias_act_ops::Backward>(
          grad, kept, MaybeTensor(), 1.0, act, grad.scalar_type(),
          bias_act_ops::Backward::Wanted{true, wanted.bias});
      if (!wanted.bias) found.bias.reset();
    }
    return found;
  }
  static Tensor composite(const Tensor& z, Act act) { return composite_activation(act, z); }
};

/// The hidden layer of gated_mlp().
struct Gated {
  using Act = Gate;
  static constexpr const char* kName = "gated_mlp";
  static constexpr const char* kUpWeight = "gate_up_weight";
  static constexpr const char* kUpBias = "gate_up_bias";
  static constexpr const char* kHidden = "half of the first size of gate_up_weight";
  static constexpr int64_t kHalves = 2;

  static Two recorded(const Tensor& x, const Tensor& weight, const MaybeTensor& bias, Act act) {
    if (auto both = gate_products::layer_with_gate(x, weight, bias, act.act, /*keeps=*/true))
      return *both;
    const Tensor kept = torchkiln::linear(x, weight, bias);
    return {gated_ops::gated(kept, act), kept};
  }
  static Tensor forward(const Tensor& x, const Tensor& weight, const MaybeTensor& bias, Act act) {
    if (auto both = gate_products::layer_with_gate(x, weight, bias, act.act, /*keeps=*/false))
      return std::get<0>(*both);
    return gated_ops::gated(torchkiln::linear(x, weight, bias), act);
  }
  static Two again(const Tensor& x, const Tensor& weight, const MaybeTensor& bias, Act) {
    return {Tensor(), torchkiln::linear(x, weight, bias)};
  }
  static Tensor output(const Tensor& kept, Act act) { return gated_ops::gated(kept, act); }
  static Passed backward(const Tensor& rows, const Tensor& down, const Tensor& kept, Act act,
                         const Wanted& wanted) {
    Passed found;
    if (wanted.output) {
      if (const auto both =
              gate_products::gradient_through_gate(rows, down, kept, act.act, wanted.overwrites)) {
        std::tie(found.grad, found.output) = *both;
        return found;
      }
    }
    const Tensor grad = input_gradient(rows, down);
    if (wanted.output && wanted.overwrites) {
      gated_ops::overwrite_with_gradient(grad, kept, act.act);
      found.grad = kept;
      found.output = grad;
    } else if (wanted.output) {
      std::tie(found.grad, found.output) =
          call_below<gated_ops::GatedBackwardWithOutput>(grad, kept, act.act);
    } else {
      found.grad =
          std::get<0>(call_below<gated_ops::GatedBackward>(grad, kept, MaybeTensor(), act.act));
    }
    return found;
  }
  static Tensor composite(const Tensor& z, Act act) {
    const auto parts = z.chunk(2, -1);
    return composite_activation(act.act, parts[0]) * parts[1];
  }
};

void check_layer(const char* op, const Tensor& x, const char* weight_name, const Tensor& weight,
                 const c10::SymInt& terms, const char* terms_name, const char* bias_name,
                 const MaybeTensor& bias) {
  check_tensors(op, {{"x", x}, {weight_name, weight}});
  check_weight_dtype(op, x, weight_name, weight);
  TORCH_CHECK(weight.dim() == 2 && weight.sym_size(1) == terms, "torchkiln.", op, ": ", weight_name,
              ": got shape ", weight.sym_sizes(), ", expected 2 dimensions, the last of size ",
              terms, ", ", terms_name);
  if (!bias) return;
  check_tensors(op, {{"x", x}, {bias_name, *bias}});
  check_same_dtype(op, bias_name, *bias, "x", x);
  const std::string words = std::string("the first size of ") + weight_name;
  check_vector(op, bias_name, *bias, weight.sym_size(0), words.c_str());
}

/// The arguments of both ops. For gated_mlp, `up` is the weight of gate and up.
template <class Act>
struct Call {
  Borrowed<Tensor> x, up, down;
  Borrowed<MaybeTensor> up_bias, down_bias;
  Act act;
  HiddenSave save;

  TORCHKILN_FIELDS(self.x, self.up, self.down, self.up_bias, self.down_bias, self.act, self.save);
};

/// Checks the arguments and returns the sizes of the output.
template <class Kind>
c10::SymDimVector checked_sizes(const Call<typename Kind::Act>& call) {
  const Tensor &x = call.x, &up = call.up, &down = call.down;
  check_tensor(Kind::kName, "x", x);
  check_dtype(Kind::kName, "x", x);
  check_not_0_dim(Kind::kName, "x", x);
  check_layer(Kind::kName, x, Kind::kUpWeight, up, x.sym_size(-1), "the last size of x",
              Kind::kUpBias, call.up_bias);
  TORCH_CHECK(up.sym_size(0) % Kind::kHalves == 0, "torchkiln.", Kind::kName, ": ", Kind::kUpWeight,
              ": got shape ", up.sym_sizes(),
              ", expected an even number of rows, those of gate and up");
  check_layer(Kind::kName, x, "down_weight", down, up.sym_size(0) / Kind::kHalves, Kind::kHidden,
              "down_bias", call.down_bias);
  c10::SymDimVector sizes(x.sym_sizes());
  sizes.back() = down.sym_size(0);
  return sizes;
}

/// Whether this node is the only owner of the tensors that it saved, and backward does not run
/// again.
bool is_last_use(bool was_hooked) {
  return !was_hooked && !torch::autograd::get_current_graph_task_keep_graph();
}

template <class Kind>
struct Schema;
template <>
struct Schema<Plain> {
  static constexpr bool kFlexibleLayout = true;
  static constexpr const char* kSchema =
      "torchkiln::mlp(Tensor x, Tensor up_weight, Tensor down_weight, Tensor? up_bias=None, "
      "Tensor? down_bias=None, *, str act='gelu', str save='preact') -> Tensor";
};
template <>
struct Schema<Gated> {
  static constexpr bool kFlexibleLayout = true;
  static constexpr const char* kSchema =
      "torchkiln::gated_mlp(Tensor x, Tensor gate_up_weight, Tensor down_weight, "
      "Tensor? gate_up_bias=None, Tensor? down_bias=None, *, str act='silu', str save='preact') "
      "-> Tensor";
};

template <class Kind>
struct Op : Schema<Kind> {
  using Act = typename Kind::Act;

  using Arguments = Call<Act>;

  static Tensor meta(const Arguments& call) { return empty_of(checked_sizes<Kind>(call), call.x); }

  static Tensor kernel(const Arguments& call) {
    checked_sizes<Kind>(call);
    return torchkiln::linear(Kind::forward(call.x, call.up, call.up_bias, call.act), call.down,
                             call.down_bias);
  }

  /// The op with torch's own ops; `product` is the dtype of the matrix products.
  static Tensor composite_in(at::ScalarType product, const Arguments& call) {
    checked_sizes<Kind>(call);
    const auto layer = [&](const Tensor& x, const Tensor& weight, const MaybeTensor& bias) {
      const MaybeTensor shift = bias ? MaybeTensor(bias->to(product)) : std::nullopt;
      return at::linear(x.to(product), weight.to(product), shift);
    };
    const Tensor z = layer(call.x, call.up, call.up_bias).to(compute_dtype(product));
    return layer(Kind::composite(z, call.act), call.down, call.down_bias).to(call.x->scalar_type());
  }

  static Tensor composite(const Arguments& call) {
    return composite_in(call.x->scalar_type(), call);
  }

  /// Products are float32, because vmap adds a bias in a separate op: a product in x's dtype would
  /// be rounded before the sum.
  static Tensor batched(const Arguments& call) {
    return composite_in(compute_dtype(call.x->scalar_type()), call);
  }

  static Tensor recorded(const Below&, const Arguments& call) {
    checked_sizes<Kind>(call);
    const Tensor &x = call.x, &up = call.up, &down = call.down;
    const Act act = call.act;
    Tensor out, kept;
    {
      const at::AutoDispatchBelowADInplaceOrView below;
      Tensor hidden;
      if (call.save == HiddenSave::preact) {
        std::tie(hidden, kept) = Kind::recorded(x, up, call.up_bias, act);
      } else {
        hidden = Kind::forward(x, up, call.up_bias, act);
      }
      out = torchkiln::linear(hidden, down, call.down_bias);
    }
    const Tensor up_shift = tensor_or_undefined(call.up_bias);
    const Tensor down_shift = tensor_or_undefined(call.down_bias);
    const bool was_hooked = !at::SavedTensorDefaultHooks::get_tls_state().stack.empty();
    return record(
        Kind::kName, {x, up, down, up_shift, down_shift}, out,
        keep(x, up, down, up_shift, down_shift, kept), [=](const Incoming& in, const Kept<6>& all) {
          const auto& [x, up, down, up_bias, down_bias, saved] = all;
          if (in.needs_composite()) {
            return composite_gradients(
                in, std::array{x, up, down, up_bias, down_bias}, [&](const auto& inputs) {
                  return call_composite<Op>(inputs[0], inputs[1], inputs[2], maybe(inputs[3]),
                                            maybe(inputs[4]), act, HiddenSave::none);
                });
          }
          const bool wants_layer = in.wants(0) || in.wants(1) || in.wants(3);
          const Tensor rows = as_matrix(in[0]);
          Tensor hidden, kept = saved;
          if (!kept.defined() && (wants_layer || in.wants(2)))
            std::tie(hidden, kept) = Kind::again(x, up, maybe(up_bias), act);
          Passed passed;
          if (wants_layer) {
            const bool is_plain = Below(detail::keys_of(rows, kept)).is_plain();
            const bool overwrites = is_plain && (!saved.defined() || is_last_use(was_hooked));
            passed = Kind::backward(
                rows, down, as_matrix(kept), act,
                Wanted{in.wants(3), in.wants(2) && !hidden.defined(), overwrites, is_plain});
            if (!hidden.defined()) hidden = std::move(passed.output);
          } else if (in.wants(2) && !hidden.defined()) {
            hidden = Kind::output(kept, act);
          }
          kept.reset();
          variable_list found(5);
          if (in.wants(2)) found[2] = weight_gradient(rows, as_matrix(hidden));
          hidden.reset();
          if (in.wants(0)) {
            found[0] = input_gradient(passed.grad, up);
            if (x.dim() != 2) found[0] = found[0].view_symint(x.sym_sizes());
          }
          if (in.wants(1)) found[1] = weight_gradient(passed.grad, as_matrix(x));
          if (in.wants(3))
            found[3] = passed.bias.defined() ? passed.bias : bias_gradient(passed.grad);
          if (in.wants(4)) found[4] = bias_gradient(rows);
          return found;
        });
  }

  /// Casts all tensors to the autocast dtype, as torch's layers do.
  static Tensor autocast(const Autocast& cast, const Arguments& call) {
    check_tensors(Kind::kName,
                  {{"x", call.x}, {Kind::kUpWeight, call.up}, {"down_weight", call.down}});
    return torchkiln::call<Op>(cast(*call.x), cast(*call.up), cast(*call.down), cast(call.up_bias),
                               cast(call.down_bias), call.act, call.save);
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) { define<Op<Plain>, Op<Gated>>(m); }

}  // namespace torchkiln::mlp_ops

namespace torchkiln {

at::Tensor mlp(const at::Tensor& x, const at::Tensor& up_weight, const at::Tensor& down_weight,
               const MaybeTensor& up_bias, const MaybeTensor& down_bias,
               const MlpOptions& options) {
  return call<mlp_ops::Op<mlp_ops::Plain>>(x, up_weight, down_weight, up_bias, down_bias, options);
}

at::Tensor gated_mlp(const at::Tensor& x, const at::Tensor& gate_up_weight,
                     const at::Tensor& down_weight, const MaybeTensor& gate_up_bias,
                     const MaybeTensor& down_bias, const GatedMlpOptions& options) {
  return call<mlp_ops::Op<mlp_ops::Gated>>(x, gate_up_weight, down_weight, gate_up_bias, down_bias,
                                           options);
}

}  // namespace torchkiln
