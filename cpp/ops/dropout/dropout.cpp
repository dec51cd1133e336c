// dropout_add and bias_dropout_add: dropout(x + bias) + residual in one pass. The mask is a
// function of a state {seed, offset} and the index of an element, so backward generates it again. A
// traced graph has two ops: State draws random numbers, and WithState computes the result and may
// run twice.

#include "detail/column_sum.h"
#include "dropout/state.h"
#include "torchkiln/torch/checks.h"
#include "torchkiln/torch/elementwise.h"
#include "torchkiln/torch/empty.h"
#include "torchkiln/torch/op.h"
#include "torchkiln/torch/ops.h"

namespace torchkiln::dropout_ops {
namespace {

using at::Tensor;
using Two = std::tuple<Tensor, Tensor>;

void check_p(const char* op, double p) {
  TORCH_CHECK_VALUE(p >= 0 && p <= 1, "torchkiln.", op, ": p: got ", p,
                    ", expected a probability between 0 and 1");
}

/// The arguments of the ops.
struct Call {
  Borrowed<Tensor> x;
  Borrowed<Tensor> bias;  // only in bias_dropout_add
  Borrowed<Tensor> residual;
  double p;
  bool training;
};

void check_inputs(const Call& call) {
  const Tensor& x = call.x;
  const char* op = call.bias ? "bias_dropout_add" : "dropout_add";
  check_tensor(op, "x", x);
  check_dtype(op, "x", x);
  check_like_or_mixed(op, "residual", call.residual, "x", x);
  if (call.bias) {
    check_tensors(op, {{"x", x}, {"bias", call.bias}});
    check_parameter_dtype(op, "bias", call.bias->scalar_type(), "x", x.scalar_type());
    check_not_0_dim(op, "x", x);
    check_vector(op, "bias", call.bias, x.sym_size(-1), "the last dimension of x");
  }
  check_p(op, call.p);
}

/// The dtype of the result: the wider one of x and residual.
at::ScalarType result_dtype(const Call& call) {
  return at::promote_types(call.x->scalar_type(), call.residual->scalar_type());
}

Tensor checked_output(const Call& call) {
  check_inputs(call);
  return empty_of(call.x->sym_sizes(), call.x->options().dtype(result_dtype(call)));
}

void run(const Call& call, const Dropout& dropout, const Tensor& out) {
  if (call.bias) {
    launch_elementwise(
        "bias_dropout_add", std::array{out}, std::array{*call.x, *call.bias, *call.residual},
        [&](const auto& p, auto stream) { return cuda::bias_dropout_add(p, dropout, stream); },
        [&](const auto& p, int64_t begin, int64_t end) {
          return cpu::bias_dropout_add(p, dropout, begin, end);
        });
  } else {
    launch_elementwise(
        "dropout_add", std::array{out}, std::array{*call.x, *call.residual},
        [&](const auto& p, auto stream) { return cuda::dropout_add(p, dropout, stream); },
        [&](const auto& p, int64_t begin, int64_t end) {
          return cpu::dropout_add(p, dropout, begin, end);
        });
  }
}

/// Computes the wanted gradients of x and bias.
struct Backward {
  using Wanted = std::array<bool, 2>;
  struct Arguments {
    Borrowed<Tensor> grad, state;
    double p;
    at::ScalarType bias_dtype;
    Wanted wanted;
    std::optional<at::ScalarType> x_dtype;

    TORCHKILN_FIELDS(self.grad, self.state, self.p, self.bias_dtype, self.wanted, self.x_dtype);
  };
  static constexpr bool kFlexibleLayout = true;
  static constexpr const char* kSchema =
      "torchkiln::_dropout_add_backward(Tensor grad, Tensor state, float p, ScalarType bias_dtype, "
      "bool[2] wanted, ScalarType? x_dtype=None) -> (Tensor, Tensor)";
  static constexpr const char* kName = "dropout_add_backward";

  static Two meta(const Arguments& call) {
    const Tensor& grad = call.grad;
    check_tensors(kName, {{"grad", grad}, {"state", call.state}});
    check_dtype(kName, "grad", grad);
    check_state(kName, call.state);
    check_p(kName, call.p);
    const at::ScalarType grad_x_dtype = call.x_dtype.value_or(grad.scalar_type());
    return {call.wanted[0] ? empty_of(grad.sym_sizes(), grad.options().dtype(grad_x_dtype))
                           : no_output(grad),
            call.wanted[1] ? empty_of({grad.sym_size(-1)}, grad.options().dtype(call.bias_dtype))
                           : no_output(grad)};
  }

  static Two kernel(const Arguments& call) {
    auto [grad_x, grad_bias] = meta(call);
    const Tensor& grad = call.grad;
    const Wanted wanted = call.wanted;
    if (grad.numel() == 0 || call.p == 1) return {grad_x.zero_(), grad_bias.zero_()};
    const Dropout dropout = dropout_of(call.p, call.state);
    if (wanted[1] && grad.is_cuda() && grad_x.scalar_type() == grad.scalar_type()) {
      run_with_bias(grad, dropout, grad_x, grad_bias);
      return {grad_x, grad_bias};
    }
    // Keeps a gradient in the compute dtype if it will be summed for the bias.
    const at::ScalarType compute = compute_dtype(grad.scalar_type());
    const Tensor passed =
        wanted[1] ? empty_of(grad.sym_sizes(), grad.options().dtype(compute)) : grad_x;
    launch_elementwise(
        kName, std::array{passed}, std::array{grad},
        [&](const auto& arguments, auto stream) {
          return cuda::dropout_backward(arguments, dropout, stream);
        },
        [&](const auto& arguments, int64_t begin, int64_t end) {
          return cpu::dropout_backward(arguments, dropout, begin, end);
        });
    if (!wanted[1]) return {grad_x, grad_bias};
    if (wanted[0]) grad_x.copy_(passed);
    return {grad_x, sum_to_last(passed, 1, call.bias_dtype)};
  }

  /// Computes both gradients in one pass, only on a GPU.
  static void run_with_bias(const Tensor& grad, const Dropout& dropout, const Tensor& grad_x,
                            const Tensor& grad_bias) {
    const int64_t columns = grad.size(-1);
    const int64_t rows = grad.numel() / columns;
    const Tensor grad_rows = grad.reshape({rows, columns});  // a view if rows are evenly spaced
    DropoutBackward arguments{};
    arguments.grad = grad_rows.const_data_ptr();
    arguments.grad_x = grad_x.numel() > 0 ? grad_x.data_ptr() : nullptr;
    arguments.grad_bias = grad_bias.data_ptr();
    arguments.dtype = dtype_of(grad);
    arguments.bias_dtype = dtype_of(grad_bias);
    arguments.rows = rows;
    arguments.columns = columns;
    arguments.grad_row_stride = grad_rows.stride(0);
    arguments.grad_column_stride = grad_rows.stride(1);
    arguments.dropout = dropout;
    launch_allocating(
        kName, grad, 0, 1,
        [&](Allocate allocate, auto stream) {
          return cuda::bias_dropout_backward(arguments, allocate, stream);
        },
        [](int64_t, int64_t) { return Status{}; });
  }
};

/// Computes the result, in training with a new mask. Writes the state to `record`, unless that is
/// null.
Tensor computed(const Call& call, int64_t* record = nullptr) {
  Tensor out = checked_output(call);
  if (call.training && call.p == 1) return out.copy_(call.residual);
  Dropout dropout = dropout_of(call.training ? call.p : 0);
  if (call.training && call.p > 0) dropout.random = next_state(call.x);
  dropout.random.record = record;
  run(call, dropout, out);
  return out;
}

/// The result with torch's own ops in the compute dtype. scaled(sum) must apply the mask and the
/// scale.
template <class Scaled>
Tensor composite_with(const Call& call, const Scaled& scaled) {
  check_inputs(call);
  const at::ScalarType compute = compute_dtype(call.x->scalar_type());
  const Tensor wide = call.x->to(compute);
  const Tensor sum = call.bias ? wide + call.bias->to(compute) : wide;
  return (scaled(sum) + call.residual->to(compute)).to(result_dtype(call));
}

/// The op under vmap: torch's dropout, which follows vmap's randomness rules.
Tensor batched_with(const Call& call) {
  return composite_with(call,
                        [&](const Tensor& sum) { return at::dropout(sum, call.p, call.training); });
}

/// The gradients of x, bias and residual, with the mask of `state`.
variable_list gradients(const Incoming& in, const Tensor& state, double p, at::ScalarType x_dtype,
                        at::ScalarType bias_dtype) {
  const Tensor& grad = in[0];
  const Backward::Wanted wanted{in.wants(0), in.wants(1)};
  if (!wanted[0] && !wanted[1]) return {Tensor(), Tensor(), grad};
  Tensor grad_x, grad_bias;
  if (in.needs_composite()) {
    // Multiplies the gradient by the mask as factors, so that the product can be differentiated
    // again.
    const Tensor wide = grad.to(compute_dtype(grad.scalar_type()));
    const Tensor ones = at::ones_like(wide, at::MemoryFormat::Contiguous);
    const Tensor passed =
        wide * std::get<0>(call_below<Backward>(ones, state, p, bias_dtype,
                                                Backward::Wanted{true, false}, std::nullopt));
    grad_x = passed.to(x_dtype);
    if (wanted[1]) grad_bias = sum_to_last(passed, 1, bias_dtype);
  } else {
    std::tie(grad_x, grad_bias) = call_below<Backward>(grad, state, p, bias_dtype, wanted, x_dtype);
  }
  return {grad_x, grad_bias, grad};
}

/// Records `out` in the autograd graph. Backward generates the mask of `state` again.
Tensor record_mask(const Call& call, const Tensor& out, const Tensor& state) {
  const at::ScalarType x_dtype = call.x->scalar_type();
  const at::ScalarType bias_dtype = call.bias ? call.bias->scalar_type() : x_dtype;
  return record("dropout_add", {*call.x, *call.bias, *call.residual}, out, keep(state),
                [x_dtype, bias_dtype, p = call.p](const Incoming& in, const Kept<1>& kept) {
                  return gradients(in, kept[0], p, x_dtype, bias_dtype);
                });
}

/// The op with a state that was drawn before, or without a mask if no state is given. It draws no
/// random numbers, so a graph may compute it twice, as activation checkpointing does.
struct WithState {
  struct Arguments : Call {
    Borrowed<MaybeTensor> given_bias;
    Borrowed<MaybeTensor> state;

    void complete() {
      if (given_bias) bias = *given_bias;
      training = state.has_value();
    }
    TORCHKILN_FIELDS(self.x, self.given_bias, self.residual, self.state, self.p);
  };
  static constexpr bool kFlexibleLayout = true;
  static constexpr const char* kSchema =
      "torchkiln::_dropout_add_with_state(Tensor x, Tensor? bias, Tensor residual, Tensor? state, "
      "float p) -> Tensor";
  static constexpr std::array<size_t, 2> kPromotedBy{0, 2};
  static constexpr std::array<size_t, 3> kReadsMixed{0, 1, 2};

  static Tensor meta(const Arguments& call) {
    Tensor out = checked_output(call);
    if (call.state) {
      check_tensors("dropout_add_with_state", {{"x", call.x}, {"state", *call.state}});
      check_state("dropout_add_with_state", *call.state);
    }
    return out;
  }

  static Tensor kernel(const Arguments& call) {
    if (!call.state) return computed(call);
    Tensor out = meta(call);
    if (call.p == 1) return out.copy_(call.residual);
    run(call, dropout_of(call.p, *call.state), out);
    return out;
  }

  static Tensor composite(const Arguments& call) { return composite_of(call, call.state); }
  static Tensor composite_of(const Call& call, const MaybeTensor& state) {
    return composite_with(call, [&](const Tensor& sum) {
      return state.has_value() ? sum * mask_factors(sum.detach(), state, call.p) : sum;
    });
  }

  /// The mask as factors 0 and 1 / (1 - p), which transforms can differentiate.
  static Tensor mask_factors(const Tensor& like, const MaybeTensor& state, double p) {
    const at::AutoDispatchBelowADInplaceOrView below;
    return torchkiln::call<WithState>(at::ones_like(like), std::nullopt, at::zeros_like(like),
                                      state, p);
  }

  static Tensor batched(const Arguments& call) { return batched_with(call); }
  static Tensor recorded(const Below& below, const Arguments& call) {
    if (!call.state) return composite(call);
    return record_mask(call, below.call<WithState>(call), *call.state);
  }
};

/// The functions of dropout_add and bias_dropout_add. In a trace or under a mode, such an op
/// becomes two: State draws the random numbers, WithState computes the result.
template <class Arguments>
struct DropoutOp {
  static constexpr bool kRandom = true;

  static Tensor meta(const Arguments& call) { return checked_output(call); }
  static Tensor kernel(const Arguments& call) { return computed(call); }
  static Tensor batched(const Arguments& call) { return batched_with(call); }

  static Tensor composite(const Arguments& call) {
    check_inputs(call);
    MaybeTensor state;
    if (call.training && call.p == 1) state = State::composite(call.x);
    if (call.training && call.p > 0 && call.p < 1) state = torchkiln::call<State>(call.x->detach());
    return WithState::composite_of(call, state);
  }

  static Tensor recorded(const Below& below, const Arguments& call) {
    if (!call.training || call.p == 0) return WithState::composite_of(call, std::nullopt);
    if (below.is_plain()) {
      const at::AutoDispatchBelowADInplaceOrView guard;
      const Tensor state = at::empty({2}, at::TensorOptions(at::kLong).device(call.x->device()));
      return record_mask(call, computed(call, state.data_ptr<int64_t>()), state);
    }
    check_inputs(call);
    const MaybeTensor state = below.call<State>(*call.x);
    const MaybeTensor bias = call.bias ? MaybeTensor(*call.bias) : std::nullopt;
    const Tensor out = below.call<WithState>(*call.x, bias, *call.residual, state, call.p);
    return record_mask(call, out, *state);
  }
};

struct DropoutAddCall : Call {
  TORCHKILN_FIELDS(self.x, self.residual, self.p, self.training);
};
struct DropoutAdd : DropoutOp<DropoutAddCall> {
  static constexpr bool kFlexibleLayout = true;
  static constexpr const char* kSchema =
      "torchkiln::dropout_add(Tensor x, Tensor residual, float p=0.5, bool training=True) -> "
      "Tensor";
  static constexpr std::array<size_t, 2> kPromotedBy{0, 1};
  static constexpr std::array<size_t, 2> kReadsMixed{0, 1};
};

struct BiasDropoutAddCall : Call {
  TORCHKILN_FIELDS(self.x, self.bias, self.residual, self.p, self.training);
};
struct BiasDropoutAdd : DropoutOp<BiasDropoutAddCall> {
  static constexpr bool kFlexibleLayout = true;
  static constexpr const char* kSchema =
      "torchkiln::bias_dropout_add(Tensor x, Tensor bias, Tensor residual, float p=0.5, "
      "bool training=True) -> Tensor";
  static constexpr std::array<size_t, 2> kPromotedBy{0, 2};
  static constexpr std::array<size_t, 3> kReadsMixed{0, 1, 2};
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) {
  define<State, Backward, WithState, DropoutAdd, BiasDropoutAdd>(m);
}

}  // namespace torchkiln::dropout_ops

namespace torchkiln {

at::Tensor dropout_add(const at::Tensor& x, const at::Tensor& residual, double p, bool training) {
  return call<dropout_ops::DropoutAdd>(x, residual, p, training);
}

at::Tensor bias_dropout_add(const at::Tensor& x, const at::Tensor& bias, const at::Tensor& residual,
                            double p, bool training) {
  return call<dropout_ops::BiasDropoutAdd>(x, bias, residual, p, training);
}

}  // namespace torchkiln
