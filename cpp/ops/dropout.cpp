#include "torchkiln/kernels/dropout.h"

#include <ATen/CPUGeneratorImpl.h>

#include <mutex>

#include "detail/column_sum.h"
#include "torchkiln/torch/checks.h"
#include "torchkiln/torch/elementwise.h"
#include "torchkiln/torch/empty.h"
#include "torchkiln/torch/op.h"
#include "torchkiln/torch/ops.h"
#include "torchkiln/torch/torch_cuda.h"

namespace torchkiln::dropout_ops {
namespace {

using at::Tensor;
using Two = std::tuple<Tensor, Tensor>;

void check_p(const char* op, double p) {
  TORCH_CHECK_VALUE(p >= 0 && p <= 1, "torchkiln.", op, ": p: got ", p,
                    ", expected a probability between 0 and 1");
}

void check_inputs(const Tensor& x, const MaybeTensor& bias, const Tensor& residual, double p) {
  const char* op = bias.has_value() ? "bias_dropout_add" : "dropout_add";
  check_tensor(op, "x", x);
  check_dtype(op, "x", x);
  check_like_or_mixed(op, "residual", residual, "x", x);
  if (bias.has_value()) {
    check_tensors(op, {{"x", x}, {"bias", *bias}});
    check_parameter_dtype(op, "bias", bias->scalar_type(), "x", x.scalar_type());
    check_not_0_dim(op, "x", x);
    check_vector(op, "bias", *bias, x.sym_size(-1), "the last dimension of x");
  }
  check_p(op, p);
}

/// The dtype of the result: the wider one of x and residual.
at::ScalarType result_dtype(const Tensor& x, const Tensor& residual) {
  return at::promote_types(x.scalar_type(), residual.scalar_type());
}

Tensor checked_output(const Tensor& x, const MaybeTensor& bias, const Tensor& residual, double p) {
  check_inputs(x, bias, residual, p);
  return empty_of(x.sym_sizes(), x.options().dtype(result_dtype(x, residual)));
}

/// The kernels' parameters for a drop probability p < 1.
Dropout dropout_of(double p) { return {RandomState{}, last_word(1 - p), 1 / (1 - p)}; }

/// Takes a state from torch's generator for the device. Each output element has its own Philox
/// subsequence, so a call advances the generator by 4 words.
RandomState next_state(const Tensor& where) {
#ifdef TORCHKILN_WITH_CUDA
  if (where.is_cuda()) return torch_cuda().next_random(where.device());
#else
  (void)where;
#endif
  auto* generator = at::get_generator_or_default<at::CPUGeneratorImpl>(
      std::nullopt, at::detail::getDefaultCPUGenerator());
  const std::lock_guard<std::mutex> lock(generator->mutex_);
  RandomState state;
  state.seed = generator->random64();
  return state;
}

void run(const Tensor& x, const MaybeTensor& bias, const Tensor& residual, const Dropout& dropout,
         const Tensor& out) {
  if (bias.has_value()) {
    launch_elementwise(
        "bias_dropout_add", std::array{out}, std::array{x, *bias, residual},
        [&](const auto& p, auto stream) { return cuda::bias_dropout_add(p, dropout, stream); },
        [&](const auto& p, int64_t begin, int64_t end) {
          return cpu::bias_dropout_add(p, dropout, begin, end);
        });
  } else {
    launch_elementwise(
        "dropout_add", std::array{out}, std::array{x, residual},
        [&](const auto& p, auto stream) { return cuda::dropout_add(p, dropout, stream); },
        [&](const auto& p, int64_t begin, int64_t end) {
          return cpu::dropout_add(p, dropout, begin, end);
        });
  }
}

/// Draws {seed, offset}, from which every op below generates the same mask. It is on the device,
/// because each replay of a CUDA graph has its own. Traced graphs contain this op, so that they can
/// save its result and compute the rest again.
struct State {
  static constexpr const char* kSchema = "torchkiln::dropout_state(Tensor x) -> Tensor";
  static constexpr const char* kName = "dropout_state";
  static constexpr bool kRandom = true;

  static Tensor meta(const Tensor& x) { return at::empty({2}, x.options().dtype(at::kLong)); }

  static Tensor kernel(const Tensor& x) {
    check_tensor(kName, "x", x);
    Tensor state = meta(x);
    RandomState random = next_state(x);
    random.record = state.data_ptr<int64_t>();
    launch(
        kName, x, 1, 1, [&](auto stream) { return cuda::record_random(random, stream); },
        [&](int64_t, int64_t) {
          random.write_record();
          return Status{};
        });
    return state;
  }

  /// Under vmap the state is not used: the op that takes it draws by vmap's rules.
  static Tensor composite(const Tensor& x) { return at::zeros({2}, x.options().dtype(at::kLong)); }
};

/// A tensor without memory may be the state of several shards, see torchkiln.distributed.
void check_state(const char* op, const Tensor& state) {
  const c10::SymInt numel = state.is_meta() ? state.sym_size(-1) : state.sym_numel();
  TORCH_CHECK(state.scalar_type() == at::kLong && state.is_contiguous() && numel == 2, "torchkiln.",
              op, ": state: got ", dtype_name(state.scalar_type()), " ", state.sym_sizes(),
              ", expected int64 [2], {seed, offset} of dropout_state");
}

/// The parameters for the mask of a state, for p < 1.
Dropout dropout_of(double p, const Tensor& state) {
  Dropout dropout = dropout_of(p);
  dropout.random.seed_from = state.const_data_ptr<int64_t>();
  dropout.random.offset_from = state.const_data_ptr<int64_t>() + 1;
  return dropout;
}

/// The wanted gradients of x and bias.
struct Backward {
  using Wanted = std::array<bool, 2>;
  static constexpr const char* kSchema =
      "torchkiln::dropout_add_backward(Tensor grad, Tensor state, float p, ScalarType bias_dtype, "
      "bool[2] wanted, ScalarType? x_dtype=None) -> (Tensor, Tensor)";
  static constexpr const char* kName = "dropout_add_backward";

  static Two meta(const Tensor& grad, const Tensor& state, double p, at::ScalarType bias_dtype,
                  Wanted wanted, std::optional<at::ScalarType> x_dtype) {
    check_tensors(kName, {{"grad", grad}, {"state", state}});
    check_dtype(kName, "grad", grad);
    check_state(kName, state);
    check_p(kName, p);
    const at::ScalarType grad_x_dtype = x_dtype.value_or(grad.scalar_type());
    return {wanted[0] ? empty_of(grad.sym_sizes(), grad.options().dtype(grad_x_dtype))
                      : no_output(grad),
            wanted[1] ? empty_of({grad.sym_size(-1)}, grad.options().dtype(bias_dtype))
                      : no_output(grad)};
  }

  static Two kernel(const Tensor& grad, const Tensor& state, double p, at::ScalarType bias_dtype,
                    Wanted wanted, std::optional<at::ScalarType> x_dtype) {
    auto [grad_x, grad_bias] = meta(grad, state, p, bias_dtype, wanted, x_dtype);
    if (grad.numel() == 0 || p == 1) return {grad_x.zero_(), grad_bias.zero_()};
    const Dropout dropout = dropout_of(p, state);
    if (wanted[1] && grad.is_cuda() && grad_x.scalar_type() == grad.scalar_type()) {
      run_with_bias(grad, dropout, grad_x, grad_bias);
      return {grad_x, grad_bias};
    }
    // A gradient that will be summed for the bias stays in the compute dtype.
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
    return {grad_x, sum_to_last(passed, 1, bias_dtype)};
  }

  /// Computes both gradients in one pass, on a GPU.
  static void run_with_bias(const Tensor& grad, const Dropout& dropout, const Tensor& grad_x,
                            const Tensor& grad_bias) {
    const int64_t columns = grad.size(-1);
    const int64_t rows = grad.numel() / columns;
    const Tensor grad_rows = grad.reshape({rows, columns});  // a view where rows are evenly spaced
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

/// The op with a new mask if `training`. `record` points to where its state is written, or is null.
Tensor computed(const Tensor& x, const MaybeTensor& bias, const Tensor& residual, double p,
                bool training, int64_t* record = nullptr) {
  Tensor out = checked_output(x, bias, residual, p);
  if (training && p == 1) return out.copy_(residual);
  Dropout dropout = dropout_of(training ? p : 0);
  if (training && p > 0) dropout.random = next_state(x);
  dropout.random.record = record;
  run(x, bias, residual, dropout, out);
  return out;
}

/// The op with torch's own ops in the compute dtype; scaled(sum) drops and scales.
template <class Scaled>
Tensor composite_with(const Tensor& x, const MaybeTensor& bias, const Tensor& residual,
                      const Scaled& scaled) {
  const at::ScalarType compute = compute_dtype(x.scalar_type());
  const Tensor wide = x.to(compute);
  const Tensor sum = bias.has_value() ? wide + bias->to(compute) : wide;
  return (scaled(sum) + residual.to(compute)).to(result_dtype(x, residual));
}

/// The op under vmap: torch's dropout, which follows vmap's randomness rules.
Tensor batched_with(const Tensor& x, const MaybeTensor& bias, const Tensor& residual, double p,
                    bool training) {
  check_inputs(x, bias, residual, p);
  return composite_with(x, bias, residual,
                        [&](const Tensor& sum) { return at::dropout(sum, p, training); });
}

/// Connects `out` to its inputs; backward generates the mask of `state` again.
Tensor record_mask(const Tensor& x, const MaybeTensor& bias, const Tensor& residual, double p,
                   const Tensor& out, const Tensor& state) {
  const at::ScalarType x_dtype = x.scalar_type();
  const at::ScalarType bias_dtype = bias.has_value() ? bias->scalar_type() : x_dtype;
  return record("dropout_add", {x, tensor_or_undefined(bias), residual}, out, keep(state),
                [=](const Incoming& in, const Kept<1>& kept) {
                  const Tensor& grad = in[0];
                  if (!in.wants(0) && !in.wants(1)) return variable_list{Tensor(), Tensor(), grad};
                  Tensor grad_x, grad_bias;
                  if (in.needs_composite()) {
                    // The gradient times the mask as factors is differentiable again.
                    const at::ScalarType compute = compute_dtype(grad.scalar_type());
                    const Tensor wide = grad.to(compute);
                    const Tensor ones = at::ones_like(wide, at::MemoryFormat::Contiguous);
                    const Tensor factor = std::get<0>(call_below<Backward>(
                        ones, kept[0], p, bias_dtype, Backward::Wanted{true, false}, std::nullopt));
                    const Tensor passed = wide * factor;
                    grad_x = passed.to(x_dtype);
                    if (in.wants(1)) grad_bias = sum_to_last(passed, 1, bias_dtype);
                  } else {
                    std::tie(grad_x, grad_bias) =
                        call_below<Backward>(grad, kept[0], p, bias_dtype,
                                             Backward::Wanted{in.wants(0), in.wants(1)}, x_dtype);
                  }
                  return variable_list{in.wants(0) ? grad_x : Tensor(),
                                       in.wants(1) ? grad_bias : Tensor(), grad};
                });
}

/// The op with a state that was drawn before, or without a mask if there is no state. It draws no
/// random numbers, so a graph may compute it twice: activation checkpointing does.
struct WithState {
  static constexpr const char* kSchema =
      "torchkiln::dropout_add_with_state(Tensor x, Tensor? bias, Tensor residual, Tensor? state, "
      "float p) -> Tensor";
  static constexpr std::array<size_t, 2> kPromotedBy{0, 2};
  static constexpr std::array<size_t, 3> kReadsMixed{0, 1, 2};

  static Tensor meta(const Tensor& x, const MaybeTensor& bias, const Tensor& residual,
                     const MaybeTensor& state, double p) {
    Tensor out = checked_output(x, bias, residual, p);
    if (state.has_value()) {
      check_tensors("dropout_add_with_state", {{"x", x}, {"state", *state}});
      check_state("dropout_add_with_state", *state);
    }
    return out;
  }

  static Tensor kernel(const Tensor& x, const MaybeTensor& bias, const Tensor& residual,
                       const MaybeTensor& state, double p) {
    if (!state.has_value()) return computed(x, bias, residual, p, /*training=*/false);
    Tensor out = meta(x, bias, residual, state, p);
    if (p == 1) return out.copy_(residual);
    run(x, bias, residual, dropout_of(p, *state), out);
    return out;
  }

  static Tensor composite(const Tensor& x, const MaybeTensor& bias, const Tensor& residual,
                          const MaybeTensor& state, double p) {
    check_inputs(x, bias, residual, p);
    return composite_with(x, bias, residual, [&](const Tensor& sum) {
      return state.has_value() ? sum * mask_factors(sum.detach(), state, p) : sum;
    });
  }

  /// The mask as factors 0 and 1 / (1 - p), which transforms can differentiate through.
  static Tensor mask_factors(const Tensor& like, const MaybeTensor& state, double p) {
    const at::AutoDispatchBelowADInplaceOrView below;
    return call<WithState>(at::ones_like(like), std::nullopt, at::zeros_like(like), state, p);
  }

  static Tensor batched(const Tensor& x, const MaybeTensor& bias, const Tensor& residual,
                        const MaybeTensor& state, double p) {
    return batched_with(x, bias, residual, p, state.has_value());
  }

  static Tensor recorded(const Below& below, const Tensor& x, const MaybeTensor& bias,
                         const Tensor& residual, const MaybeTensor& state, double p) {
    if (!state.has_value()) return composite(x, bias, residual, state, p);
    const Tensor out = below.call<WithState>(x, bias, residual, state, p);
    return record_mask(x, bias, residual, p, out, *state);
  }
};

Tensor meta(const Tensor& x, const MaybeTensor& bias, const Tensor& residual, double p, bool) {
  return checked_output(x, bias, residual, p);
}

Tensor kernel(const Tensor& x, const MaybeTensor& bias, const Tensor& residual, double p,
              bool training) {
  return computed(x, bias, residual, p, training);
}

Tensor composite(const Tensor& x, const MaybeTensor& bias, const Tensor& residual, double p,
                 bool training) {
  check_inputs(x, bias, residual, p);
  MaybeTensor state;
  if (training && p == 1) state = State::composite(x);
  if (training && p > 0 && p < 1) state = call<State>(x.detach());
  return WithState::composite(x, bias, residual, state, p);
}

Tensor recorded(const Below& below, const Tensor& x, const MaybeTensor& bias,
                const Tensor& residual, double p, bool training) {
  if (!training || p == 0) return WithState::composite(x, bias, residual, std::nullopt, p);
  if (below.is_plain()) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const Tensor state = at::empty({2}, at::TensorOptions(at::kLong).device(x.device()));
    const Tensor out = computed(x, bias, residual, p, training, state.data_ptr<int64_t>());
    return record_mask(x, bias, residual, p, out, state);
  }
  // A tracer or a mode gets two ops, of which only the small one is random.
  check_inputs(x, bias, residual, p);
  const Tensor state = below.call<State>(x);
  return WithState::recorded(below, x, bias, residual, state, p);
}

struct DropoutAdd {
  static constexpr const char* kSchema =
      "torchkiln::dropout_add(Tensor x, Tensor residual, float p=0.5, bool training=True) -> "
      "Tensor";
  static constexpr bool kRandom = true;
  static constexpr std::array<size_t, 2> kPromotedBy{0, 1};
  static constexpr std::array<size_t, 2> kReadsMixed{0, 1};

  /// Adapts a function of dropout_ops, which also takes a bias, to this schema.
  template <Tensor (*function)(const Tensor&, const MaybeTensor&, const Tensor&, double, bool)>
  static Tensor without_bias(const Tensor& x, const Tensor& residual, double p, bool training) {
    return function(x, std::nullopt, residual, p, training);
  }
  static constexpr auto meta = without_bias<dropout_ops::meta>;
  static constexpr auto kernel = without_bias<dropout_ops::kernel>;
  static constexpr auto composite = without_bias<dropout_ops::composite>;
  static constexpr auto batched = without_bias<batched_with>;
  static Tensor recorded(const Below& below, const Tensor& x, const Tensor& residual, double p,
                         bool training) {
    return dropout_ops::recorded(below, x, std::nullopt, residual, p, training);
  }
};

struct BiasDropoutAdd {
  static constexpr const char* kSchema =
      "torchkiln::bias_dropout_add(Tensor x, Tensor bias, Tensor residual, float p=0.5, "
      "bool training=True) -> Tensor";
  static constexpr bool kRandom = true;
  static constexpr std::array<size_t, 2> kPromotedBy{0, 2};
  static constexpr std::array<size_t, 3> kReadsMixed{0, 1, 2};

  /// Adapts a function of dropout_ops, whose bias is optional, to this schema.
  template <Tensor (*function)(const Tensor&, const MaybeTensor&, const Tensor&, double, bool)>
  static Tensor with_bias(const Tensor& x, const Tensor& bias, const Tensor& residual, double p,
                          bool training) {
    return function(x, bias, residual, p, training);
  }
  static constexpr auto meta = with_bias<dropout_ops::meta>;
  static constexpr auto kernel = with_bias<dropout_ops::kernel>;
  static constexpr auto composite = with_bias<dropout_ops::composite>;
  static constexpr auto batched = with_bias<batched_with>;
  static Tensor recorded(const Below& below, const Tensor& x, const Tensor& bias,
                         const Tensor& residual, double p, bool training) {
    return dropout_ops::recorded(below, x, bias, residual, p, training);
  }
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
