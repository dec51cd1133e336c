// Batch norm over a group of processes: ops for its steps, and the op that calls them with
// collectives in between. Forward: moments, gather, statistics, outputs. Backward: sums, their
// total over the processes, the gradient of x. Under torch.compile Python calls the steps, and the
// compiler sees the collectives.

#include "batch_norm/operands.h"
#include "detail/collectives.h"
#include "torchkiln/torch/checks.h"

namespace torchkiln::batch_norm_ops {
namespace {

using Two = std::tuple<Tensor, Tensor>;

constexpr const char* kSync = "sync_bn_act";

/// Computes the moments of x, [2 * channels + 1]: means, sums of the squared distances from the
/// means, count. Without elements all of them are 0.
struct SyncMoments {
  static constexpr const char* kSchema = "torchkiln::_sync_bn_moments(Tensor x) -> Tensor";

  static Tensor meta(const Tensor& x) {
    check_tensor(kSync, "x", x);
    check_dtype(kSync, "x", x);
    check_rank(kSync, "x", x, 2, INT64_MAX, "[batch, channels, ...]");
    return empty_of({2 * x.sym_size(1) + 1}, x.options().dtype(at::kDouble));
  }

  static Tensor kernel(const Tensor& x) {
    Tensor moments = meta(x);
    if (x.numel() == 0) return moments.zero_();
    const Operands operands(x, {}, {}, {});
    BatchNorm arguments{};
    operands.fill(arguments);
    arguments.training = true;
    arguments.moments = moments.data_ptr<double>();
    launch_split(
        kSync, x, arguments, kGrain, cpu::split,
        [&](Allocate allocate, auto stream) {
          return cuda::batch_norm_moments(arguments, allocate, stream);
        },
        cpu::batch_norm_moments, cpu::batch_norm_finish);
    return moments;
  }
};

/// Computes the statistics, [3, channels], and the elements per channel, [1], from the moments of
/// all processes. Moves the running statistics, by 1 / batches if `batches` is given.
struct SyncStatistics {
  struct Arguments : Call {
    Borrowed<Tensor> moments;
    Borrowed<MaybeTensor> batches;

    void complete() {
      act = kActivation<None>;
      training = updates = true;
      name = kSync;
    }

    TORCHKILN_FIELDS(self.x, self.moments, self.running_mean, self.running_var, self.batches,
                     self.momentum, self.eps);
  };
  static constexpr const char* kSchema =
      "torchkiln::_sync_bn_statistics(Tensor x, Tensor moments, Tensor(a!)? running_mean, "
      "Tensor(b!)? running_var, Tensor? batches, float momentum, float eps) -> (Tensor, Tensor)";

  static Two meta(const Arguments& call) {
    check(call);
    const Tensor& x = call.x;
    check_moments(kSync, call.moments, x);
    if (call.batches) {
      const Tensor& batches = *call.batches;
      check_same_device(kSync, "batches", batches, "x", x);
      TORCH_CHECK(batches.scalar_type() == at::kLong && batches.sym_numel() == 1, "torchkiln.",
                  kSync, ": batches: got ", dtype_name(batches.scalar_type()), " ",
                  batches.sym_sizes(), ", expected an int64");
    }
    return {empty_of({3, x.sym_size(1)}, x.options().dtype(compute_dtype(x.scalar_type()))),
            empty_of({1}, call.moments)};
  }

  static Two kernel(const Arguments& call) {
    auto [statistics, count] = meta(call);
    if (call.x->size(1) == 0) return {statistics, count.zero_()};
    merge_moments(call, call.moments, call.batches, statistics, count);
    return {statistics, count};
  }
};

/// Computes y and, if backward needs them, the signs, else an empty tensor.
struct SyncForward {
  struct Arguments : Call {
    Borrowed<Tensor> statistics;

    void complete() {
      training = true;
      updates = false;
      momentum = eps = 0;
      name = kSync;
    }

    TORCHKILN_FIELDS(self.x, self.statistics, self.weight, self.bias, self.residual, self.act);
  };
  static constexpr const char* kSchema =
      "torchkiln::_sync_bn_forward(Tensor x, Tensor statistics, Tensor? weight, Tensor? bias, "
      "Tensor? residual, str act) -> (Tensor, Tensor)";

  static Two meta(const Arguments& call) {
    check(call);
    check_statistics(kSync, call.statistics, call.x);
    auto [y, unused, signs] = empty_outputs(call, /*for_backward=*/true);
    return {y, signs};
  }

  static Two kernel(const Arguments& call) {
    auto [y, signs] = meta(call);
    if (y.numel() > 0) normalize(call, call.statistics, y, signs);
    return {y, signs};
  }
};

/// Returns this process's share of the coefficients of the gradient of x, [2, channels], its share
/// of the gradients of weight and bias, and the gradient of the residual. Results that are not
/// wanted are empty tensors.
struct SyncSums {
  using Wanted = std::array<bool, 4>;
  struct Arguments : Gradient {
    Borrowed<Tensor> count;
    Wanted wanted;

    TORCHKILN_FIELDS(self.grad, self.x, self.statistics, self.count, self.weight, self.bias,
                     self.residual, self.signs, self.act, self.wanted);
  };
  static constexpr const char* kSchema =
      "torchkiln::_sync_bn_backward_sums(Tensor grad, Tensor x, Tensor statistics, Tensor count, "
      "Tensor? weight, Tensor? bias, Tensor? residual, Tensor? signs, str act, bool[4] wanted) -> "
      "(Tensor, Tensor, Tensor, Tensor)";

  static Four meta(const Arguments& call) {
    const Tensor &statistics = call.statistics, &count = call.count;
    const Wanted& wanted = call.wanted;
    check_backward(kSync, call);
    check_same_device(kSync, "count", count, "grad", call.grad);
    TORCH_CHECK(count.scalar_type() == at::kDouble && count.sym_numel() == 1, "torchkiln.", kSync,
                ": count: got ", dtype_name(count.scalar_type()), " ", count.sym_sizes(),
                ", expected a float64");
    Four found = empty_gradients(call, {false, wanted[1], wanted[2], wanted[3]});
    std::get<0>(found) =
        wanted[0] ? empty_of({2, call.x->sym_size(1)}, statistics) : no_output(statistics);
    return found;
  }

  static Four kernel(const Arguments& call) {
    auto [coefficients, grad_weight, grad_bias, grad_residual] = meta(call);
    const Tensor& x = call.x;
    if (x.numel() == 0)
      return {coefficients.zero_(), grad_weight.zero_(), grad_bias.zero_(), grad_residual};
    const Operands operands(x, call.weight, call.bias, call.residual);
    const MaybeCopy dense_grad = in_layout("grad", *call.grad, operands.channels_last());
    BatchNormBackward arguments = arguments_of(call, operands, *dense_grad);
    arguments.grad_weight = output(grad_weight);
    arguments.grad_bias = output(grad_bias);
    arguments.grad_residual = output(grad_residual);
    arguments.count = call.count->const_data_ptr<double>();
    arguments.coefficients = output(coefficients);
    launch_split(
        kSync, x, arguments, kGrain, cpu::split,
        [&](Allocate allocate, auto stream) {
          return cuda::batch_norm_backward_sums(arguments, allocate, stream);
        },
        cpu::batch_norm_sums, cpu::batch_norm_sums_finish);
    return {coefficients, grad_weight, grad_bias, grad_residual};
  }
};

/// Computes the gradient of x from the coefficients, added over all processes.
struct SyncInputGradient {
  struct Arguments : Gradient {
    Borrowed<Tensor> coefficients;

    TORCHKILN_FIELDS(self.grad, self.x, self.statistics, self.coefficients, self.weight, self.bias,
                     self.residual, self.signs, self.act);
  };
  static constexpr const char* kSchema =
      "torchkiln::_sync_bn_backward_input(Tensor grad, Tensor x, Tensor statistics, "
      "Tensor coefficients, Tensor? weight, Tensor? bias, Tensor? residual, Tensor? signs, "
      "str act) -> Tensor";

  static Tensor meta(const Arguments& call) {
    const Tensor &coefficients = call.coefficients, &statistics = call.statistics;
    const c10::SymInt channels = call.x->sym_size(1);
    check_backward(kSync, call);
    check_same_device(kSync, "coefficients", coefficients, "grad", call.grad);
    TORCH_CHECK(coefficients.scalar_type() == statistics.scalar_type() &&
                    coefficients.is_contiguous() && coefficients.sym_numel() == 2 * channels,
                "torchkiln.", kSync, ": coefficients: got ", dtype_name(coefficients.scalar_type()),
                " ", coefficients.sym_sizes(), ", expected ", dtype_name(statistics.scalar_type()),
                " [2, ", channels,
                "]: the coefficients of _sync_bn_backward_sums, added over all processes");
    return std::get<0>(empty_gradients(call, {true, false, false, false}));
  }

  static Tensor kernel(const Arguments& call) {
    Tensor grad_x = meta(call);
    const Tensor& x = call.x;
    if (x.numel() == 0) return grad_x;
    const Operands operands(x, call.weight, call.bias, call.residual);
    const MaybeCopy dense_grad = in_layout("grad", *call.grad, operands.channels_last());
    BatchNormBackward arguments = arguments_of(call, operands, *dense_grad);
    arguments.grad_x = grad_x.data_ptr();
    arguments.coefficients = const_cast<void*>(call.coefficients->const_data_ptr());
    launch_elements(
        kSync, x, [&](auto stream) { return cuda::batch_norm_backward_input(arguments, stream); },
        [&](int64_t begin, int64_t end) {
          return cpu::batch_norm_backward(arguments, begin, end);
        });
    return grad_x;
  }
};

/// Gives the gradients a history that raises an error if they are differentiated.
void refuse_second_derivatives(const Incoming& in, const Kept<7>& kept,
                               const variable_list& found) {
  const auto& [x, statistics, count, weight, bias, residual, signs] = kept;
  record("sync_bn_act_backward", {in[0], x, weight, bias, residual},
         std::make_tuple(found[0], found[1], found[2], found[3]), Kept<0>{},
         [](const Incoming&, const Kept<0>&) -> variable_list {
           TORCH_CHECK_NOT_IMPLEMENTED(
               false, "torchkiln.", kSync,
               ": got a second derivative, expected first derivatives only, which exchange their "
               "sums between processes; use BatchNormAct2d to differentiate twice");
         });
}

variable_list gradients(const Incoming& in, const Kept<7>& kept, Activation act, bool channels_last,
                        const std::string& group) {
  constexpr c10::DispatchKeySet kBatched(
      {c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::Batched});
  TORCH_CHECK_NOT_IMPLEMENTED(!in[0].key_set().has_any(kBatched), "torchkiln.", kSync,
                              ": got gradients with is_grads_batched=True, expected one at a time, "
                              "whose sums every process "
                              "exchanges once");
  const auto& [saved, statistics, count, weight, bias, residual, signs] = kept;
  const MaybeCopy pixels = in_order_of_signs(saved, signs, channels_last);
  const Tensor& x = *pixels;
  const bool passes = act == kActivation<None>;  // then grad_residual is the incoming gradient
  const SyncSums::Wanted wanted{in.wants(0), in.wants(1), in.wants(2), in.wants(3) && !passes};
  auto [coefficients, grad_weight, grad_bias, grad_residual] =
      call_below<SyncSums>(in[0], x, statistics, count, maybe(weight), maybe(bias), maybe(residual),
                           maybe(signs), act, wanted);
  Tensor grad_x;
  if (wanted[0]) {
    add_over_processes(coefficients, group);
    // With relu, the residual and the argument of the activation have the same gradient.
    const bool shares = wanted[3] && act == kActivation<Relu>;
    grad_x = call_below<SyncInputGradient>(
        shares ? grad_residual : in[0], x, statistics, coefficients, maybe(weight), maybe(bias),
        maybe(residual), shares ? std::nullopt : maybe(signs), shares ? kActivation<None> : act);
  }
  variable_list found{grad_x, grad_weight, grad_bias, grad_residual};
  if (at::GradMode::is_enabled()) refuse_second_derivatives(in, kept, found);
  if (passes) found[3] = in[0];
  return found;
}

/// The whole op in eager mode. It is composite, so that modes and tensor subclasses see its steps
/// and the collectives.
struct SyncOp {
  struct Arguments : Call {
    Borrowed<MaybeTensor> batches;
    Borrowed<MaybeTensor> moments;  // moments of x, if computed before
    std::string_view group;

    TORCHKILN_FIELDS(self.x, self.weight, self.bias, self.running_mean, self.running_var,
                     self.residual, self.batches, self.moments, self.act, self.momentum, self.eps,
                     self.group);
  };
  static constexpr const char* kSchema =
      "torchkiln::_sync_bn_act(Tensor x, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, "
      "Tensor(b!)? running_var, Tensor? residual, Tensor? batches, Tensor? moments, str act, "
      "float momentum, float eps, str group) -> Tensor";

  static Tensor kernel(const Arguments& call) {
    const Tensor& x = call.x;
    const MaybeTensor &weight = call.weight, &bias = call.bias, &residual = call.residual;
    const MaybeTensor &mean = call.running_mean, &var = call.running_var, &batches = call.batches;
    const std::array<Tensor, 3> inputs{tensor_or_undefined(weight), tensor_or_undefined(bias),
                                       tensor_or_undefined(residual)};
    TORCH_CHECK_NOT_IMPLEMENTED(
        !is_transformed(x, inputs[0], inputs[1], inputs[2]), "torchkiln.", kSync,
        ": got a call under torch.func or with a tangent, expected reverse mode, whose collectives "
        "every process runs once");
    const std::string group(call.group);
    const Tensor own = call.moments ? *call.moments : call_below<SyncMoments>(x);
    const auto [statistics, count] = call_below<SyncStatistics>(x, gathered(own, group), mean, var,
                                                                batches, call.momentum, call.eps);
    const auto [y, signs] =
        call_below<SyncForward>(x, statistics, weight, bias, residual, call.act);
    if (!at::GradMode::is_enabled()) return y;
    const Saved kept = kept_by_batch_norm(call.act, residual.has_value());
    return record(
        "sync_bn_act", {x, inputs[0], inputs[1], inputs[2]}, y,
        keep(x, statistics, count, inputs[0], inputs[1],
             kept == Saved::input ? inputs[2] : Tensor(), kept == Saved::sign ? signs : Tensor()),
        [act = call.act, last = channels_are_last(x), group](const Incoming& in,
                                                             const Kept<7>& kept) {
          return gradients(in, kept, act, last, group);
        });
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) {
  define<SyncMoments, SyncStatistics, SyncForward, SyncSums, SyncInputGradient>(m);
  m.def(SyncOp::kSchema);
  using Composite = detail::Entry<SyncOp, SyncOp::kernel>;
  m.impl(name_of_op<SyncOp>(),
         torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd, TORCH_FN(Composite::call)));
}

}  // namespace torchkiln::batch_norm_ops
