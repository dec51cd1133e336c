// The loss of cross_entropy, and its metrics for the log of a training run. Forward computes the
// loss and the state of each row (see state_size() in kernel.h), from which backward computes the
// gradient of the logits without computing their sums again. kernel.h launches the kernels,
// composite.h has the loss with torch's ops, overwrite.h the checks of inplace_backward. shard.cpp
// has the loss of a shard of the classes; the files linear_* also compute the logits.

#include <limits>

#include "cross_entropy/composite.h"
#include "cross_entropy/kernel.h"
#include "cross_entropy/metrics.h"
#include "cross_entropy/overwrite.h"
#include "torchkiln/torch/empty.h"
#include "torchkiln/torch/ops.h"
#include "torchkiln/torch/written.h"

namespace torchkiln::cross_entropy_ops {
namespace {

using at::Tensor;
using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

/// The dtype of the loss: options.loss_dtype if given, else the wider dtype of logits and
/// probabilities.
at::ScalarType dtype_of_loss(const Tensor& logits, const Tensor& target,
                             const LossOptions& options) {
  if (options.loss_dtype.has_value() || target.scalar_type() == at::kLong)
    return options.loss_dtype.value_or(logits.scalar_type());
  return at::promote_types(logits.scalar_type(), target.scalar_type());
}

void check_classes_if_asked(const Tensor& logits, const Tensor& target,
                            const LossOptions& options) {
  if (options.check_target && target.scalar_type() == at::kLong)
    check_classes(kName, target, logits.size(class_dim(logits)), options.ignore_index);
}

// ---- forward: the loss and the state of each row ----

Two forward_outputs(const Tensor& logits, const Tensor& target, const LossOptions& options) {
  check_loss(kName, logits, target, options);
  TORCH_CHECK(!options.accuracy || target.scalar_type() == at::kLong, "torchkiln.", kName,
              ": return_accuracy: got True with a target of probabilities, expected int64 classes");
  const auto with = [&](at::ScalarType dtype) { return logits.options().dtype(dtype); };
  return {
      empty_of(loss_shape(logits, options.reduction), with(dtype_of_loss(logits, target, options))),
      empty_of({state_size(sym_row_count(logits), options.reduction, options.accuracy)},
               with(compute_dtype(logits.scalar_type())))};
}

Two forward(const Tensor& logits, const Tensor& target, const LossOptions& options) {
  auto [loss, state] = forward_outputs(logits, target, options);
  check_classes_if_asked(logits, target, options);
  const bool each = options.reduction == LossReduction::none;
  if (target.numel() == 0) {
    const bool mean = options.reduction == LossReduction::mean;
    return {loss.fill_(mean ? std::numeric_limits<double>::quiet_NaN() : 0), state.zero_()};
  }
  const bool direct = each && loss.scalar_type() == state.scalar_type();
  const Tensor losses = direct ? loss : at::empty({row_count(logits)}, state.options());
  const RowState rows = row_state(state, losses.numel(), options.reduction);
  const LossSum total = sum_arguments(logits, options, losses, rows, loss);
  run_forward(kName, logits, target, options, losses, rows, each ? nullptr : &total);
  if (each && !direct) loss.copy_(losses.view(loss.sizes()));
  return {loss, state};
}

struct Forward {
  struct Options : LossOptions {
    TORCHKILN_FIELDS(self.weight, self.ignore_index, self.reduction, self.label_smoothing,
                     self.z_loss, self.loss_dtype, self.check_target, self.accuracy);
  };
  static constexpr bool kFlexibleLayout = true;
  static constexpr const char* kSchema =
      "torchkiln::_cross_entropy_forward(Tensor logits, Tensor target, Tensor? weight, "
      "int ignore_index, str reduction, float label_smoothing, float z_loss, "
      "ScalarType? loss_dtype, bool check_target, bool accuracy=False) -> (Tensor, Tensor)";

  static Two meta(const Tensor& logits, const Tensor& target, const Options& options) {
    return forward_outputs(logits, target, options);
  }
  static Two kernel(const Tensor& logits, const Tensor& target, const Options& options) {
    return forward(logits, target, options);
  }
};

// ---- backward: the gradient of the logits ----

/// An uninitialised gradient whose class dimension has stride 1 and whose other dimensions are
/// contiguous.
Tensor empty_gradient(const Tensor& logits) {
  return classes_back(empty_contiguous(classes_last(logits)));
}

struct BackwardOptions : LossOptions {
  Tensor state;  // result of forward, without accuracy

  TORCHKILN_FIELDS(self.weight, self.state, self.ignore_index, self.reduction, self.label_smoothing,
                   self.z_loss);
};

void check_backward(const Tensor& grad, const Tensor& logits, const Tensor& target,
                    const BackwardOptions& options) {
  constexpr const char* kBackward = "cross_entropy_backward";
  const Tensor& state = options.state;
  check_loss(kBackward, logits, target, options);
  check_tensors(kBackward, {{"logits", logits}, {"grad", grad}, {"state", state}});
  check_dtype(kBackward, "grad", grad);
  const c10::SymDimVector shape = loss_shape(logits, options.reduction);
  TORCH_CHECK(grad.sym_sizes().equals(shape), "torchkiln.", kBackward, ": grad: got shape ",
              grad.sym_sizes(), ", expected ", c10::SymIntArrayRef(shape),
              ", the shape of the loss");
  const c10::SymInt size = state_size(sym_row_count(logits), options.reduction, false);
  const at::ScalarType compute = compute_dtype(logits.scalar_type());
  const bool fits = state.dim() == 1 && state.sym_size(0) == size;
  TORCH_CHECK(state.scalar_type() == compute && fits && state.is_contiguous(), "torchkiln.",
              kBackward, ": state: got ", dtype_name(state.scalar_type()), " ", state.sym_sizes(),
              ", expected ", dtype_name(compute), " [", size, "], the state of the forward");
}

struct Backward {
  static constexpr bool kFlexibleLayout = true;
  static constexpr const char* kSchema =
      "torchkiln::_cross_entropy_backward(Tensor grad, Tensor logits, Tensor target, "
      "Tensor? weight, Tensor state, int ignore_index, str reduction, float label_smoothing, "
      "float z_loss) -> Tensor";

  static Tensor meta(const Tensor& grad, const Tensor& logits, const Tensor& target,
                     const BackwardOptions& options) {
    check_backward(grad, logits, target, options);
    return empty_gradient(logits);
  }

  static Tensor kernel(const Tensor& grad, const Tensor& logits, const Tensor& target,
                       const BackwardOptions& options) {
    check_backward(grad, logits, target, options);
    if (logits.numel() == 0) return empty_gradient(logits);
    const RowState kept = row_state(options.state, row_count(logits), options.reduction);
    const MaybeCopy logit_rows = has_adjacent_rows(logits, target, options)
                                     ? MaybeCopy::borrowed(logits)
                                     : class_rows(logits);
    const Tensor& rows = *logit_rows;
    if (!rows.is_alias_of(logits)) {
      // `rows` is a copy that is not read again, so the gradient overwrites it.
      run_backward("cross_entropy_backward", grad, rows, target, options, kept, rows);
      return classes_back(rows.view(classes_last(logits).sizes()));
    }
    Tensor found = empty_gradient(logits);
    run_backward("cross_entropy_backward", grad, rows, target, options, kept, *class_rows(found));
    return found;
  }
};

/// Writes the gradient over the logits. Inductor calls this op where it would call Backward on
/// logits that are not read again: see src/torchkiln/ops/_over_logits.py.
struct BackwardInPlace {
  static constexpr const char* kName = "cross_entropy_backward";
  static constexpr bool kFlexibleLayout = true;
  static constexpr const char* kSchema =
      "torchkiln::_cross_entropy_backward_(Tensor grad, Tensor(a!) logits, Tensor target, "
      "Tensor? weight, Tensor state, int ignore_index, str reduction, float label_smoothing, "
      "float z_loss) -> ()";

  static void meta(const Tensor& grad, const Tensor& logits, const Tensor& target,
                   const BackwardOptions& options) {
    check_backward(grad, logits, target, options);
  }

  static void kernel(const Tensor& grad, const Tensor& logits, const Tensor& target,
                     const BackwardOptions& options) {
    check_backward(grad, logits, target, options);
    if (logits.numel() == 0) return;
    const MaybeCopy rows = class_rows(logits);
    const RowState kept = row_state(options.state, rows->size(0), options.reduction);
    run_backward(kName, grad, *rows, target, options, kept, *rows);
    if (!rows->is_alias_of(logits))
      logits.copy_(classes_back(rows->view(classes_last(logits).sizes())));
    mark_written(logits);
  }
};

/// Writes the gradient over the logits and increments their version, so that autograd reports a
/// later use of their values.
Tensor overwrite(const Tensor& grad, const Tensor& logits, const Tensor& target,
                 const BackwardOptions& options) {
  Tensor found = logits.detach();  // shares the version counter
  BackwardInPlace::kernel(grad, found, target, options);
  return found;
}

// ---- the op ----

Tensor composite(const Tensor& logits, const Tensor& target, const LossOptions& options) {
  check_loss(kName, logits, target, options);
  if (!target.is_meta()) check_classes_if_asked(logits, target, options);
  return composite_loss(logits, target, options, dtype_of_loss(logits, target, options));
}

/// Computes the loss and records it in the autograd graph. Returns the loss and the state of each
/// row.
Two recorded(const Below& below, const Tensor& logits, const Tensor& target,
             const LossOptions& options) {
  auto [loss, state] = below.call<Forward>(logits, target, options);
  const MaybeTensor& weight = options.weight;
  TORCH_CHECK(!(weight.has_value() && weight->requires_grad()), "torchkiln.", kName,
              ": weight: got a tensor that requires a gradient, expected one that does not: the "
              "loss has none with respect to class weights; pass weight.detach()");
  std::optional<Version> version;
  if (options.inplace_backward) {
    check_overwritable(logits);
    if (is_plain(logits)) version.emplace(logits);
  }
  BackwardOptions numbers;
  static_cast<LossOptions&>(numbers) = options;
  numbers.weight = std::nullopt;  // keep() saves it instead
  Tensor recorded = record(
      kName, {logits, target}, loss, keep(logits, target, state, tensor_or_undefined(weight)),
      [numbers, version, dtype = loss.scalar_type()](const Incoming& in,
                                                     const Kept<4>& kept) mutable {
        const auto& [logits, target, state, weight] = kept;
        BackwardOptions options = numbers;
        options.weight = maybe(weight);
        const bool overwrites = options.inplace_backward && is_plain(in[0]) && is_plain(logits);
        if (version && overwrites) version->check(logits);
        if (in.needs_composite()) {
          TORCH_CHECK(!(options.inplace_backward && at::GradMode::is_enabled()), "torchkiln.",
                      kName,
                      ": inplace_backward: got a backward with create_graph=True, expected "
                      "create_graph=False: a second derivative needs the logits, which the "
                      "gradient overwrites; leave inplace_backward out");
          return composite_gradients(in, std::array{logits, target}, [&](const auto& inputs) {
            return composite_loss(inputs[0], inputs[1], options, dtype);
          });
        }
        Tensor of_logits, of_target;
        if (in.wants(1)) of_target = probability_gradient(in[0], logits, target, options);
        if (in.wants(0)) {
          const c10::SymInt size = state_size(sym_row_count(logits), options.reduction, false);
          options.state = options.accuracy ? state.narrow_symint(0, 0, size) : state;
          of_logits = overwrites ? overwrite(in[0], logits, target, options)
                                 : call_below<Backward>(in[0], logits, target, options);
          if (version && overwrites) version->increment(logits);
        }
        return variable_list{of_logits, of_target};
      });
  return {recorded, state};
}

/// The options under autocast. The loss of half-precision logits is float32 unless a dtype is
/// given; the logits are not cast.
template <class Options>
Options under_autocast(const Tensor& logits, const Tensor& target, Options options) {
  check_tensors(kName, {{"logits", logits}, {"target", target}});
  if (is_half(logits.scalar_type()) && !options.loss_dtype.has_value())
    options.loss_dtype = at::kFloat;
  return options;
}

/// The loss of logits with a softcap; nullopt if there is none.
template <class Op, class Options>
auto with_softcap(const Tensor& logits, const Tensor& target, Options options)
    -> std::optional<decltype(call<Op>(logits, target, options))> {
  if (!options.softcap.has_value()) return std::nullopt;
  check_loss(kName, logits, target, options);
  options.loss_dtype = dtype_of_loss(logits, target, options);
  if (options.weight.has_value())
    options.weight = options.weight->to(compute_dtype(logits.scalar_type()));
  const double softcap = *std::exchange(options.softcap, std::nullopt);
  return call<Op>(capped(kName, logits, softcap), target, options);
}

struct Op {
  static constexpr bool kFlexibleLayout = true;
  static constexpr const char* kSchema =
      "torchkiln::cross_entropy(Tensor logits, Tensor target, Tensor? weight=None, *, "
      "int ignore_index=-100, str reduction='mean', float label_smoothing=0.0, float z_loss=0.0, "
      "ScalarType? loss_dtype=None, bool check_target=False, bool inplace_backward=False, "
      "float? softcap=None) -> Tensor";
  static constexpr std::array<size_t, 2> kPromotedBy{0, 1};  // logits and probabilities
  static constexpr std::array<size_t, 2> kReadsMixed{0, 1};
  static constexpr auto composite = cross_entropy_ops::composite;

  static Tensor meta(const Tensor& logits, const Tensor& target, const LossOptions& options) {
    return std::get<0>(forward_outputs(logits, target, options));
  }
  static Tensor kernel(const Tensor& logits, const Tensor& target, const LossOptions& options) {
    return std::get<0>(forward(logits, target, options));
  }
  static Tensor recorded(const Below& below, const Tensor& logits, const Tensor& target,
                         const LossOptions& options) {
    return std::get<0>(cross_entropy_ops::recorded(below, logits, target, options));
  }
  static Tensor autocast(const Autocast&, const Tensor& logits, const Tensor& target,
                         const LossOptions& options) {
    return call<Op>(logits, target, under_autocast(logits, target, options));
  }
  static std::optional<Tensor> rewritten(const Tensor& logits, const Tensor& target,
                                         const LossOptions& options) {
    return with_softcap<Op>(logits, target, options);
  }
};

// ---- the op with metrics for the log of a training run ----

struct WithMetrics {
  struct Options : LossOptions {
    template <class Self>
    static auto fields(Self& self) {
      return std::tuple_cat(CrossEntropyOptions::fields(self), std::tie(self.accuracy));
    }
  };
  static constexpr const char* kName = "cross_entropy";
  static constexpr bool kFlexibleLayout = true;
  static constexpr const char* kSchema =
      "torchkiln::_cross_entropy_with_metrics(Tensor logits, Tensor target, Tensor? weight=None, "
      "*, int ignore_index=-100, str reduction='mean', float label_smoothing=0.0, "
      "float z_loss=0.0, "
      "ScalarType? loss_dtype=None, bool check_target=False, bool inplace_backward=False, "
      "float? softcap=None, bool accuracy=False) -> (Tensor, Tensor, Tensor)";
  static constexpr std::array<size_t, 2> kPromotedBy = Op::kPromotedBy;
  static constexpr std::array<size_t, 2> kReadsMixed = Op::kReadsMixed;

  static Three with(const Two& outputs, const Tensor& logits, const Tensor& target,
                    const Options& options) {
    const auto& [loss, state] = outputs;
    const at::NoGradGuard without_gradients;
    const auto [z, correct] = reduced_metrics(
        metrics_of_state(sym_row_count(logits), target, state, options), loss, options);
    return {loss, z, correct};
  }

  static Three meta(const Tensor& logits, const Tensor& target, const Options& options) {
    return with(forward_outputs(logits, target, options), logits, target, options);
  }
  static Three kernel(const Tensor& logits, const Tensor& target, const Options& options) {
    return with(forward(logits, target, options), logits, target, options);
  }
  static Three composite(const Tensor& logits, const Tensor& target, const Options& options) {
    const Tensor loss = cross_entropy_ops::composite(logits, target, options);
    const auto [z, correct] = reduced_metrics(composite_metrics(logits.detach(), target, options),
                                              loss.detach(), options);
    return {loss, z, correct};
  }
  static Three recorded(const Below& below, const Tensor& logits, const Tensor& target,
                        const Options& options) {
    return with(cross_entropy_ops::recorded(below, logits, target, options), logits, target,
                options);
  }
  static Three autocast(const Autocast&, const Tensor& logits, const Tensor& target,
                        const Options& options) {
    return call<WithMetrics>(logits, target, under_autocast(logits, target, options));
  }
  static std::optional<Three> rewritten(const Tensor& logits, const Tensor& target,
                                        const Options& options) {
    return with_softcap<WithMetrics>(logits, target, options);
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) {
  define<Forward, Backward, BackwardInPlace, Op, WithMetrics>(m);
}

}  // namespace torchkiln::cross_entropy_ops

namespace torchkiln {

at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& target,
                         const CrossEntropyOptions& options) {
  return call<cross_entropy_ops::Op>(logits, target, options);
}

}  // namespace torchkiln
