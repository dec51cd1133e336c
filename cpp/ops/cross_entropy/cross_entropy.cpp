#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <limits>

#include "cross_entropy/composite.h"
#include "cross_entropy/kernel.h"
#include "cross_entropy/metrics.h"
#include "torchkiln/torch/empty.h"
#include "torchkiln/torch/ops.h"

namespace torchkiln::cross_entropy_ops {
namespace {

using at::Tensor;
using MaybeDtype = std::optional<at::ScalarType>;
using Two = std::tuple<Tensor, Tensor>;

constexpr const char* kName = "cross_entropy";

/// Options of the op that the kernels do not read.
struct Options {
  MaybeDtype dtype;
  bool check_target;
  bool inplace_backward;
  bool accuracy = false;  // the state has whether each target class has the largest logit
};

/// `dtype`, or that of the wider one of logits and probabilities.
at::ScalarType dtype_of_loss(const Tensor& logits, const Tensor& target, const MaybeDtype& dtype) {
  if (dtype.has_value() || target.scalar_type() == at::kLong)
    return dtype.value_or(logits.scalar_type());
  return at::promote_types(logits.scalar_type(), target.scalar_type());
}

void check_classes_if_asked(const Tensor& logits, const Tensor& target, const LossCall& call,
                            bool check_target) {
  if (check_target && target.scalar_type() == at::kLong)
    check_classes(kName, target, logits.size(class_dim(logits)), call.ignore_index);
}

// ---- forward: the loss and the state of each row ----

Two forward_outputs(const Tensor& logits, const Tensor& target, const LossCall& call,
                    const Options& options) {
  check_loss(kName, logits, target, call, options.dtype);
  TORCH_CHECK(!options.accuracy || target.scalar_type() == at::kLong, "torchkiln.", kName,
              ": return_accuracy: got True beside probabilities, expected it with int64 classes");
  const auto with = [&](at::ScalarType dtype) { return logits.options().dtype(dtype); };
  return {empty_of(loss_shape(logits, call.reduction),
                   with(dtype_of_loss(logits, target, options.dtype))),
          empty_of({state_size(sym_row_count(logits), call.reduction, options.accuracy)},
                   with(compute_dtype(logits.scalar_type())))};
}

Two forward(const Tensor& logits, const Tensor& target, const LossCall& call,
            const Options& options) {
  auto [loss, state] = forward_outputs(logits, target, call, options);
  check_classes_if_asked(logits, target, call, options.check_target);
  const bool each = call.reduction == LossReduction::none;
  if (target.numel() == 0) {
    const bool mean = call.reduction == LossReduction::mean;
    return {loss.fill_(mean ? std::numeric_limits<double>::quiet_NaN() : 0), state.zero_()};
  }
  const bool direct = each && loss.scalar_type() == state.scalar_type();
  const Tensor losses = direct ? loss : at::empty({row_count(logits)}, state.options());
  const RowState rows = row_state(state, losses.numel(), call.reduction);
  const LossSum total = sum_arguments(logits, call, losses, rows, loss);
  run_forward(kName, logits, target, call, losses, rows, options.accuracy, each ? nullptr : &total);
  if (each && !direct) loss.copy_(losses.view(loss.sizes()));
  return {loss, state};
}

template <Two (*function)(const Tensor&, const Tensor&, const LossCall&, const Options&)>
Two of_forward(const Tensor& logits, const Tensor& target, const MaybeTensor& weight,
               int64_t ignore_index, LossReduction reduction, double label_smoothing, double z_loss,
               MaybeDtype dtype, bool check_target, bool accuracy) {
  return function(logits, target, {weight, ignore_index, reduction, label_smoothing, z_loss},
                  {dtype, check_target, /*inplace_backward=*/false, accuracy});
}

struct Forward {
  static constexpr const char* kSchema =
      "torchkiln::cross_entropy_forward(Tensor logits, Tensor target, Tensor? weight, "
      "int ignore_index, str reduction, float label_smoothing, float z_loss, ScalarType? dtype, "
      "bool check_target, bool accuracy=False) -> (Tensor, Tensor)";
  static constexpr auto meta = of_forward<forward_outputs>;
  static constexpr auto kernel = of_forward<forward>;
};

// ---- backward: the gradient of the logits ----

/// A gradient whose class dimension has stride 1 and whose other dimensions are contiguous.
Tensor empty_gradient(const Tensor& logits) {
  return classes_back(empty_contiguous(classes_last(logits)));
}

void check_backward(const Tensor& grad, const Tensor& logits, const Tensor& target,
                    const Tensor& state, const LossCall& call) {
  constexpr const char* kBackward = "cross_entropy_backward";
  check_loss(kBackward, logits, target, call);
  check_tensors(kBackward, {{"logits", logits}, {"grad", grad}, {"state", state}});
  check_dtype(kBackward, "grad", grad);
  const c10::SymDimVector shape = loss_shape(logits, call.reduction);
  TORCH_CHECK(grad.sym_sizes().equals(shape), "torchkiln.", kBackward, ": grad: got shape ",
              grad.sym_sizes(), ", expected ", c10::SymIntArrayRef(shape),
              ", the shape of the loss");
  const c10::SymInt size = state_size(sym_row_count(logits), call.reduction, false);
  const at::ScalarType compute = compute_dtype(logits.scalar_type());
  const bool fits = state.dim() == 1 && state.sym_size(0) == size;
  TORCH_CHECK(state.scalar_type() == compute && fits && state.is_contiguous(), "torchkiln.",
              kBackward, ": state: got ", dtype_name(state.scalar_type()), " ", state.sym_sizes(),
              ", expected that of the forward, ", dtype_name(compute), " [", size, "]");
}

struct Backward {
  static constexpr const char* kSchema =
      "torchkiln::cross_entropy_backward(Tensor grad, Tensor logits, Tensor target, "
      "Tensor? weight, Tensor state, int ignore_index, str reduction, float label_smoothing, "
      "float z_loss) -> Tensor";

  static Tensor meta(const Tensor& grad, const Tensor& logits, const Tensor& target,
                     const MaybeTensor& weight, const Tensor& state, int64_t ignore_index,
                     LossReduction reduction, double label_smoothing, double z_loss) {
    check_backward(grad, logits, target, state,
                   {weight, ignore_index, reduction, label_smoothing, z_loss});
    return empty_gradient(logits);
  }

  static Tensor kernel(const Tensor& grad, const Tensor& logits, const Tensor& target,
                       const MaybeTensor& weight, const Tensor& state, int64_t ignore_index,
                       LossReduction reduction, double label_smoothing, double z_loss) {
    const LossCall call{weight, ignore_index, reduction, label_smoothing, z_loss};
    check_backward(grad, logits, target, state, call);
    if (logits.numel() == 0) return empty_gradient(logits);
    const MaybeCopy logit_rows = class_rows(logits);
    const Tensor& rows = *logit_rows;
    const RowState kept = row_state(state, rows.size(0), reduction);
    if (!rows.is_alias_of(logits)) {
      // The rows are a copy that is not read again: the gradient overwrites it.
      run_backward("cross_entropy_backward", grad, rows, target, call, kept, rows);
      return classes_back(rows.view(classes_last(logits).sizes()));
    }
    Tensor found = empty_gradient(logits);
    run_backward("cross_entropy_backward", grad, rows, target, call, kept, *class_rows(found));
    return found;
  }
};

// ---- inplace_backward: the gradient overwrites the logits ----

/// Whether a tensor's memory may be written directly, which a trace, a transform or a tensor
/// subclass would miss.
bool is_plain(const Tensor& tensor) {
  using Key = c10::DispatchKey;
  constexpr c10::DispatchKeySet kWrapped{Key::Python, Key::Functionalize, Key::Batched,
                                         Key::FuncTorchBatched, Key::FuncTorchGradWrapper};
  return (tensor.is_cpu() || tensor.is_cuda()) && !tensor.key_set().has_any(kWrapped) &&
         !c10::impl::TorchDispatchModeTLS::any_modes_set();
}

/// Refuses logits whose memory is a leaf's, as torch's in-place operations do.
void check_is_no_leaf(const Tensor& logits) {
  const bool is_view = logits.is_view() && logits._base().requires_grad();
  TORCH_CHECK(
      !logits.is_leaf() && !(is_view && logits._base().is_leaf()), "torchkiln.", kName,
      ": inplace_backward: got logits that are a leaf, or a view of a leaf, that requires a "
      "gradient, expected the result of an operation: the gradient would overwrite the "
      "leaf; leave inplace_backward out");
}

void check_overwritable(const Tensor& logits) {
  if (!is_plain(logits)) return;
  if (logits.requires_grad()) check_is_no_leaf(logits);
  if (logits.numel() == 0) return;
  const Tensor last = classes_last(logits);
  const auto rows = rows_without_copy(last);
  TORCH_CHECK(rows && ((*rows)->size(0) == 1 || (*rows)->stride(0) >= (*rows)->size(1)),
              "torchkiln.", kName, ": inplace_backward: got logits of shape ", logits.sizes(),
              " and strides ", logits.strides(),
              ", expected rows of adjacent classes that do not overlap, for the gradient to be "
              "written over them; call .contiguous(), or leave inplace_backward out");
}

/// The memory of logits, not owned, and its version. Autograd compares the versions of saved
/// tensors itself, except of those that a hook packs (torch.autograd.graph.save_on_cpu), which may
/// be the logits.
class Version {
 public:
  explicit Version(const Tensor& logits)
      : storage_(logits.storage().getWeakStorageImpl()),
        counter_(logits.unsafeGetTensorImpl()->version_counter()),
        saved_(counter_.current_version()) {}

  void check(const Tensor& unpacked) const {
    TORCH_CHECK(!is_of(unpacked) || counter_.current_version() == saved_, "torchkiln.", kName,
                ": inplace_backward: got logits that have been modified by an inplace operation, "
                "expected them as they were: an earlier backward may have written the gradient "
                "over them; compute the loss again, or leave inplace_backward out");
  }
  void increment(const Tensor& written) {
    if (is_of(written)) counter_.bump();
  }

 private:
  bool is_of(const Tensor& tensor) const {
    return storage_._unsafe_get_target() == tensor.storage().unsafeGetStorageImpl();
  }

  c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
  c10::VariableVersion counter_;
  uint32_t saved_;
};

/// Increments the version of the logits: autograd then reports a later use of their values.
Tensor overwrite(const Tensor& grad, const Tensor& logits, const Tensor& target,
                 const Tensor& state, const LossCall& call) {
  check_backward(grad, logits, target, state, call);
  const Tensor found = logits.detach();  // shares the version counter
  if (found.numel() > 0) {
    const MaybeCopy rows = class_rows(found);
    const RowState kept = row_state(state, rows->size(0), call.reduction);
    run_backward(kName, grad, *rows, target, call, kept, *rows);
  }
  found.unsafeGetTensorImpl()->bump_version();
  return found;
}

// ---- the op ----

Tensor output(const Tensor& logits, const Tensor& target, const LossCall& call,
              const Options& options) {
  return std::get<0>(forward_outputs(logits, target, call, options));
}

Tensor kernel(const Tensor& logits, const Tensor& target, const LossCall& call,
              const Options& options) {
  return std::get<0>(forward(logits, target, call, options));
}

Tensor composite(const Tensor& logits, const Tensor& target, const LossCall& call,
                 const Options& options) {
  check_loss(kName, logits, target, call, options.dtype);
  if (!target.is_meta()) check_classes_if_asked(logits, target, call, options.check_target);
  return composite_loss(logits, target, call, dtype_of_loss(logits, target, options.dtype));
}

/// The recorded loss and its state.
Two recorded_forward(const Below& below, const Tensor& logits, const Tensor& target,
                     const LossCall& call, const Options& options) {
  auto [loss, state] = below.call<Forward>(logits, target, call.weight, call.ignore_index,
                                           call.reduction, call.label_smoothing, call.z_loss,
                                           options.dtype, options.check_target, options.accuracy);
  TORCH_CHECK(!(call.weight.has_value() && call.weight->requires_grad()), "torchkiln.", kName,
              ": weight: got a tensor that requires a gradient, expected one that does not: the "
              "loss has none with respect to class weights; pass weight.detach()");
  std::optional<Version> version;
  if (options.inplace_backward) {
    check_overwritable(logits);
    if (is_plain(logits)) version.emplace(logits);
  }
  LossCall numbers = call;
  numbers.weight = std::nullopt;  // saved by keep() instead
  Tensor recorded = record(
      kName, {logits, target}, loss, keep(logits, target, state, tensor_or_undefined(call.weight)),
      [numbers, version, dtype = loss.scalar_type(), in_place = options.inplace_backward,
       accuracy = options.accuracy](const Incoming& in, const Kept<4>& kept) mutable {
        const auto& [logits, target, all_state, weight] = kept;
        const bool overwrites = in_place && is_plain(in[0]) && is_plain(logits);
        if (version && overwrites) version->check(logits);
        LossCall call = numbers;
        call.weight = maybe(weight);
        if (in.needs_composite()) {
          TORCH_CHECK(!(in_place && at::GradMode::is_enabled()), "torchkiln.", kName,
                      ": inplace_backward: got a backward with create_graph=True, expected one "
                      "that is not differentiated again: it would need the logits that are "
                      "overwritten; leave inplace_backward out");
          return composite_gradients(in, std::array{logits, target}, [&](const auto& inputs) {
            return composite_loss(inputs[0], inputs[1], call, dtype);
          });
        }
        Tensor of_logits, of_target;
        if (in.wants(1)) of_target = probability_gradient(in[0], logits, target, call);
        if (in.wants(0)) {
          const c10::SymInt size = state_size(sym_row_count(logits), call.reduction, false);
          const Tensor state = accuracy ? all_state.narrow_symint(0, 0, size) : all_state;
          of_logits = overwrites ? overwrite(in[0], logits, target, state, call)
                                 : call_below<Backward>(in[0], logits, target, call.weight, state,
                                                        call.ignore_index, call.reduction,
                                                        call.label_smoothing, call.z_loss);
          if (version && overwrites) version->increment(logits);
        }
        return variable_list{of_logits, of_target};
      });
  return {recorded, state};
}

/// Adapts a function on LossCall and Options to the arguments of the schema.
template <Tensor (*function)(const Tensor&, const Tensor&, const LossCall&, const Options&)>
Tensor of_op(const Tensor& logits, const Tensor& target, const MaybeTensor& weight,
             int64_t ignore_index, LossReduction reduction, double label_smoothing, double z_loss,
             MaybeDtype dtype, bool check_target, bool inplace_backward, std::optional<double>) {
  return function(logits, target, {weight, ignore_index, reduction, label_smoothing, z_loss},
                  {dtype, check_target, inplace_backward});
}

MaybeTensor widened(const MaybeTensor& weight, const Tensor& logits) {
  return weight.has_value() ? MaybeTensor(weight->to(compute_dtype(logits.scalar_type()))) : weight;
}

struct Op {
  static constexpr const char* kSchema =
      "torchkiln::cross_entropy(Tensor logits, Tensor target, Tensor? weight=None, *, "
      "int ignore_index=-100, str reduction='mean', float label_smoothing=0.0, float z_loss=0.0, "
      "ScalarType? dtype=None, bool check_target=False, bool inplace_backward=False, "
      "float? softcap=None) -> Tensor";
  static constexpr std::array<size_t, 2> kPromotedBy{0, 1};  // logits and probabilities
  static constexpr std::array<size_t, 2> kReadsMixed{0, 1};
  static constexpr auto meta = of_op<output>;
  static constexpr auto kernel = of_op<cross_entropy_ops::kernel>;
  static constexpr auto composite = of_op<cross_entropy_ops::composite>;

  static Tensor recorded(const Below& below, const Tensor& logits, const Tensor& target,
                         const MaybeTensor& weight, int64_t ignore_index, LossReduction reduction,
                         double label_smoothing, double z_loss, MaybeDtype dtype, bool check_target,
                         bool inplace_backward, std::optional<double>) {
    return std::get<0>(recorded_forward(below, logits, target,
                                        {weight, ignore_index, reduction, label_smoothing, z_loss},
                                        {dtype, check_target, inplace_backward}));
  }

  /// The loss of half-precision logits is float32 unless a dtype is given; the logits are not cast.
  static Tensor autocast(const Autocast&, const Tensor& logits, const Tensor& target,
                         const MaybeTensor& weight, int64_t ignore_index, LossReduction reduction,
                         double label_smoothing, double z_loss, MaybeDtype dtype, bool check_target,
                         bool inplace_backward, std::optional<double> softcap) {
    check_tensors(kName, {{"logits", logits}, {"target", target}});
    if (is_half(logits.scalar_type()) && !dtype.has_value()) dtype = at::kFloat;
    return call<Op>(logits, target, weight, ignore_index, reduction, label_smoothing, z_loss, dtype,
                    check_target, inplace_backward, softcap);
  }

  static std::optional<Tensor> rewritten(const Tensor& logits, const Tensor& target,
                                         const MaybeTensor& weight, int64_t ignore_index,
                                         LossReduction reduction, double label_smoothing,
                                         double z_loss, MaybeDtype dtype, bool check_target,
                                         bool inplace_backward, std::optional<double> softcap) {
    if (!softcap.has_value()) return std::nullopt;
    check_loss(kName, logits, target, {weight, ignore_index, reduction, label_smoothing, z_loss},
               dtype);
    return call<Op>(capped(kName, logits, *softcap), target, widened(weight, logits), ignore_index,
                    reduction, label_smoothing, z_loss, dtype_of_loss(logits, target, dtype),
                    check_target, inplace_backward, std::nullopt);
  }
};

// ---- the op with numbers for the log of a training run ----

using Three = std::tuple<Tensor, Tensor, Tensor>;

struct WithMetrics {
  static constexpr const char* kSchema =
      "torchkiln::cross_entropy_with_metrics(Tensor logits, Tensor target, Tensor? weight=None, *, "
      "int ignore_index=-100, str reduction='mean', float label_smoothing=0.0, float z_loss=0.0, "
      "ScalarType? dtype=None, bool check_target=False, bool inplace_backward=False, "
      "float? softcap=None, bool accuracy=False) -> (Tensor, Tensor, Tensor)";
  static constexpr std::array<size_t, 2> kPromotedBy = Op::kPromotedBy;
  static constexpr std::array<size_t, 2> kReadsMixed = Op::kReadsMixed;

  static Three with(const Two& outputs, const Tensor& logits, const Tensor& target,
                    const LossCall& call, bool accuracy) {
    const auto& [loss, state] = outputs;
    const at::NoGradGuard without_gradients;
    const auto [z, correct] = reduced_metrics(
        metrics_of_state(sym_row_count(logits), target, state, call, accuracy), loss, call);
    return {loss, z, correct};
  }

  template <Two (*function)(const Tensor&, const Tensor&, const LossCall&, const Options&)>
  static Three of(const Tensor& logits, const Tensor& target, const MaybeTensor& weight,
                  int64_t ignore_index, LossReduction reduction, double label_smoothing,
                  double z_loss, MaybeDtype dtype, bool check_target, bool inplace_backward,
                  std::optional<double>, bool accuracy) {
    const LossCall call{weight, ignore_index, reduction, label_smoothing, z_loss};
    const Options options{dtype, check_target, inplace_backward, accuracy};
    return with(function(logits, target, call, options), logits, target, call, accuracy);
  }
  static constexpr auto meta = of<forward_outputs>;
  static constexpr auto kernel = of<forward>;

  static Three composite(const Tensor& logits, const Tensor& target, const MaybeTensor& weight,
                         int64_t ignore_index, LossReduction reduction, double label_smoothing,
                         double z_loss, MaybeDtype dtype, bool check_target, bool inplace_backward,
                         std::optional<double>, bool accuracy) {
    const LossCall call{weight, ignore_index, reduction, label_smoothing, z_loss};
    const Tensor loss = cross_entropy_ops::composite(
        logits, target, call, {dtype, check_target, inplace_backward, accuracy});
    const auto [z, correct] = reduced_metrics(
        composite_metrics(logits.detach(), target, call, accuracy), loss.detach(), call);
    return {loss, z, correct};
  }

  static Three recorded(const Below& below, const Tensor& logits, const Tensor& target,
                        const MaybeTensor& weight, int64_t ignore_index, LossReduction reduction,
                        double label_smoothing, double z_loss, MaybeDtype dtype, bool check_target,
                        bool inplace_backward, std::optional<double>, bool accuracy) {
    const LossCall call{weight, ignore_index, reduction, label_smoothing, z_loss};
    const Options options{dtype, check_target, inplace_backward, accuracy};
    return with(recorded_forward(below, logits, target, call, options), logits, target, call,
                accuracy);
  }

  static Three autocast(const Autocast&, const Tensor& logits, const Tensor& target,
                        const MaybeTensor& weight, int64_t ignore_index, LossReduction reduction,
                        double label_smoothing, double z_loss, MaybeDtype dtype, bool check_target,
                        bool inplace_backward, std::optional<double> softcap, bool accuracy) {
    check_tensors(kName, {{"logits", logits}, {"target", target}});
    if (is_half(logits.scalar_type()) && !dtype.has_value()) dtype = at::kFloat;
    return call<WithMetrics>(logits, target, weight, ignore_index, reduction, label_smoothing,
                             z_loss, dtype, check_target, inplace_backward, softcap, accuracy);
  }

  static std::optional<Three> rewritten(const Tensor& logits, const Tensor& target,
                                        const MaybeTensor& weight, int64_t ignore_index,
                                        LossReduction reduction, double label_smoothing,
                                        double z_loss, MaybeDtype dtype, bool check_target,
                                        bool inplace_backward, std::optional<double> softcap,
                                        bool accuracy) {
    if (!softcap.has_value()) return std::nullopt;
    check_loss(kName, logits, target, {weight, ignore_index, reduction, label_smoothing, z_loss},
               dtype);
    return call<WithMetrics>(capped(kName, logits, *softcap), target, widened(weight, logits),
                             ignore_index, reduction, label_smoothing, z_loss,
                             dtype_of_loss(logits, target, dtype), check_target, inplace_backward,
                             std::nullopt, accuracy);
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) { define<Forward, Backward, Op, WithMetrics>(m); }

}  // namespace torchkiln::cross_entropy_ops

namespace torchkiln {

at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& target,
                         const CrossEntropyOptions& options) {
  return call<cross_entropy_ops::Op>(
      logits, target, options.weight, options.ignore_index,
      InSchema<LossReduction>::read("cross_entropy", options.reduction), options.label_smoothing,
      options.z_loss, options.dtype, options.check_target, options.inplace_backward,
      options.softcap);
}

}  // namespace torchkiln
