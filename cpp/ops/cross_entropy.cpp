#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <limits>

#include "cross_entropy_call.h"
#include "cross_entropy_composite.h"
#include "cross_entropy_rows.h"
#include "torchkiln/autograd.h"
#include "torchkiln/ops.h"

namespace torchkiln::cross_entropy_ops {
namespace {

using at::Tensor;
using c10::string_view;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using MaybeTensor = std::optional<Tensor>;
using MaybeDtype = std::optional<at::ScalarType>;
using Two = std::tuple<Tensor, Tensor>;
using Schema = Tensor(const Tensor&, const Tensor&, const MaybeTensor&, int64_t, string_view,
                      double, double, MaybeDtype, bool, bool);
using ForwardSchema = Two(const Tensor&, const Tensor&, const MaybeTensor&, int64_t, string_view,
                          double, double, MaybeDtype, bool);
using BackwardSchema = Tensor(const Tensor&, const Tensor&, const Tensor&, const MaybeTensor&,
                              const Tensor&, int64_t, string_view, double, double);

constexpr const char* kOp = "cross_entropy";
constexpr const char* kForwardOp = "cross_entropy_forward";
constexpr const char* kBackwardOp = "cross_entropy_backward";

Tensor call_op(const Tensor& logits, const Tensor& target, const LossCall& call) {
  static const auto op = find_op<Schema>("torchkiln::cross_entropy");
  return op.call(logits, target, call.weight, call.ignore_index, name_of(call.reduction),
                 call.label_smoothing, call.z_loss, call.dtype, call.check_target,
                 call.inplace_backward);
}

Two call_forward(const Tensor& logits, const Tensor& target, const LossCall& call) {
  static const auto op = find_op<ForwardSchema>("torchkiln::cross_entropy_forward");
  return op.call(logits, target, call.weight, call.ignore_index, name_of(call.reduction),
                 call.label_smoothing, call.z_loss, call.dtype, call.check_target);
}

Tensor call_backward(const Tensor& grad, const Tensor& logits, const Tensor& target,
                     const Tensor& state, const LossCall& call) {
  const at::AutoDispatchBelowADInplaceOrView below;
  static const auto op = find_op<BackwardSchema>("torchkiln::cross_entropy_backward");
  return op.call(grad, logits, target, call.weight, state, call.ignore_index,
                 name_of(call.reduction), call.label_smoothing, call.z_loss);
}

/// The checked, empty loss, and what backward needs of each row; on Meta and symbolic tensors, too.
Two outputs(const Tensor& logits, const Tensor& target, const LossCall& call) {
  check_loss(kOp, logits, target, call);
  const at::TensorOptions options = logits.options().memory_format(at::MemoryFormat::Contiguous);
  const bool each = call.reduction == LossReduction::none;
  const c10::SymDimVector shape = each ? row_shape(logits) : c10::SymDimVector{};
  return {at::empty_symint(shape, options.dtype(call.loss_dtype(logits))),
          at::empty_symint({state_size(logits, call.reduction)},
                           options.dtype(compute_dtype(logits.scalar_type())))};
}

Two forward_real(const Tensor& logits, const Tensor& target, const LossCall& call) {
  auto [loss, state] = outputs(logits, target, call);
  if (call.check_target && target.scalar_type() == at::kLong) {
    check_classes(kOp, target, logits.size(class_dim(logits)), call.ignore_index);
  }
  if (target.numel() == 0) {
    state.zero_();
    const bool mean = call.reduction == LossReduction::mean;
    return {loss.fill_(mean ? std::numeric_limits<double>::quiet_NaN() : 0), state};
  }
  const bool each = call.reduction == LossReduction::none;
  const bool direct = each && loss.scalar_type() == state.scalar_type();
  const Tensor losses = direct ? loss : at::empty({row_count(logits)}, state.options());
  run_forward(kOp, logits, target, call, losses, state);
  if (each && !direct) loss.copy_(losses.view(loss.sizes()));
  if (!each) run_sum(kOp, logits, call, losses, state, loss);
  return {loss, state};
}

Tensor output(const Tensor& logits, const Tensor& target, const LossCall& call) {
  return std::get<0>(outputs(logits, target, call));
}

Tensor real(const Tensor& logits, const Tensor& target, const LossCall& call) {
  return std::get<0>(forward_real(logits, target, call));
}

void check_backward(const Tensor& grad, const Tensor& logits, const Tensor& target,
                    const Tensor& state, const LossCall& call) {
  check_loss(kBackwardOp, logits, target, call);
  check_tensor(kBackwardOp, "grad", grad);
  check_dtype(kBackwardOp, "grad", grad);
  check_same_device(kBackwardOp, "grad", grad, "logits", logits);
  check_same_device(kBackwardOp, "state", state, "logits", logits);
  const bool each = call.reduction == LossReduction::none;
  const c10::SymDimVector shape = each ? row_shape(logits) : c10::SymDimVector{};
  TORCH_CHECK(grad.sym_sizes().equals(shape), "torchkiln.", kBackwardOp, ": grad: got shape ",
              grad.sym_sizes(), ", expected ", c10::SymIntArrayRef(shape),
              ", the shape of the loss");
  const c10::SymInt size = state_size(logits, call.reduction);
  TORCH_CHECK(state.scalar_type() == compute_dtype(logits.scalar_type()) && state.dim() == 1 &&
                  state.sym_size(0) == size && state.is_contiguous(),
              "torchkiln.", kBackwardOp, ": state: got ", dtype_name(state.scalar_type()), " ",
              state.sym_sizes(), ", expected that of the forward, ",
              dtype_name(compute_dtype(logits.scalar_type())), " [", size, "]");
}

/// Contiguous but for its classes, which are adjacent.
Tensor empty_gradient(const Tensor& logits) {
  const Tensor like = classes_last(logits);
  return classes_back(at::empty_symint(
      like.sym_sizes(), logits.options().memory_format(at::MemoryFormat::Contiguous)));
}

Tensor backward_output(const Tensor& grad, const Tensor& logits, const Tensor& target,
                       const Tensor& state, const LossCall& call) {
  check_backward(grad, logits, target, state, call);
  return empty_gradient(logits);
}

Tensor backward_real(const Tensor& grad, const Tensor& logits, const Tensor& target,
                     const Tensor& state, const LossCall& call) {
  check_backward(grad, logits, target, state, call);
  if (logits.numel() == 0) return empty_gradient(logits);
  const Tensor rows = class_rows(logits);
  if (!rows.is_alias_of(logits)) {
    // A copy that nobody else reads: the gradient takes its place.
    run_backward(kBackwardOp, grad, rows, target, call, state, rows);
    return classes_back(rows.view(classes_last(logits).sizes()));
  }
  Tensor found = empty_gradient(logits);
  run_backward(kBackwardOp, grad, rows, target, call, state, class_rows(found));
  return found;
}

/// Whether the tensor's memory may be written to directly: a trace, a transform and a subclass
/// would not see it.
bool is_plain(const Tensor& tensor) {
  using Key = c10::DispatchKey;
  constexpr c10::DispatchKeySet kWrapped{Key::Python, Key::Functionalize, Key::Batched,
                                         Key::FuncTorchBatched, Key::FuncTorchGradWrapper};
  return (tensor.is_cpu() || tensor.is_cuda()) && !tensor.key_set().has_any(kWrapped) &&
         !c10::impl::TorchDispatchModeTLS::any_modes_set();
}

void check_overwritable(const Tensor& logits) {
  if (!is_plain(logits) || logits.numel() == 0) return;
  const MaybeTensor rows = class_rows_view(logits);
  TORCH_CHECK(rows.has_value() && (rows->size(0) == 1 || rows->stride(0) >= rows->size(1)),
              "torchkiln.", kOp, ": inplace_backward: got logits of shape ", logits.sizes(),
              " and strides ", logits.strides(),
              ", expected rows of adjacent classes that do not overlap, for the gradient to be "
              "written over them; call .contiguous(), or leave inplace_backward out");
}

/// The gradient in the memory of the logits, for which autograd's version of them goes up: a later
/// use of what they were is an error.
Tensor overwrite(const Tensor& grad, const Tensor& logits, const Tensor& target,
                 const Tensor& state, const LossCall& call) {
  check_backward(grad, logits, target, state, call);
  const Tensor found = logits.detach();  // which shares the version
  if (found.numel() > 0) {
    const Tensor rows = class_rows(found);
    run_backward(kBackwardOp, grad, rows, target, call, state, rows);
  }
  found.unsafeGetTensorImpl()->bump_version();
  return found;
}

struct LossFunction : torch::autograd::Function<LossFunction> {
  static Tensor forward(AutogradContext* context, const Tensor& logits, const Tensor& target,
                        const LossCall& call) {
    const at::AutoDispatchBelowADInplaceOrView below;
    auto [loss, state] = call_forward(logits, target, call);
    if (call.inplace_backward) check_overwritable(logits);
    context->saved_data["call"] =
        c10::ivalue::Tuple::create(call.ignore_index, static_cast<int64_t>(call.reduction),
                                   call.label_smoothing, call.z_loss, call.inplace_backward);
    context->save_for_backward({logits, target, state, call.weight.value_or(Tensor())});
    return loss;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const variable_list saved = context->get_saved_variables();
    const auto& [logits, target, state, weight] = std::tie(saved[0], saved[1], saved[2], saved[3]);
    const auto& numbers = context->saved_data["call"].toTupleRef().elements();
    LossCall call{};
    if (weight.defined()) call.weight = weight;
    call.ignore_index = numbers[0].toInt();
    call.reduction = static_cast<LossReduction>(numbers[1].toInt());
    call.label_smoothing = numbers[2].toDouble();
    call.z_loss = numbers[3].toDouble();
    call.inplace_backward = numbers[4].toBool();
    const Tensor& grad = grads[0];
    const bool of_logits = context->needs_input_grad(0);
    const bool of_target = context->needs_input_grad(1) && target.is_floating_point();
    const bool twice = at::GradMode::is_enabled();
    TORCH_CHECK(!(twice && call.inplace_backward), "torchkiln.", kOp,
                ": inplace_backward: got a backward with create_graph=True, expected one that is "
                "not differentiated again: it would need the logits that are overwritten; leave "
                "inplace_backward out");
    LossGradients found;
    if (twice || of_target) {
      found = composite_gradients(grad, logits, target, call, of_logits && twice, of_target);
    }
    if (of_logits && !twice) {
      const bool in_place = call.inplace_backward && is_plain(grad) && is_plain(logits);
      found.logits = in_place ? overwrite(grad, logits, target, state, call)
                              : call_backward(grad, logits, target, state, call);
    }
    return {found.logits, found.target, Tensor()};
  }
};

/// For transforms that have no kernel here.
Tensor decomposed(const Tensor& logits, const Tensor& target, const LossCall& call) {
  check_loss(kOp, logits, target, call);
  if (call.check_target && target.scalar_type() == at::kLong && !target.is_meta()) {
    check_classes(kOp, target, logits.size(class_dim(logits)), call.ignore_index);
  }
  return composite_loss(logits, target, call);
}

Tensor autograd(const Tensor& logits, const Tensor& target, const LossCall& call) {
  if (is_transformed(logits, target)) return decomposed(logits, target, call);
  if (needs_gradient(logits, target)) return LossFunction::apply(logits, target, call);
  const at::AutoDispatchBelowADInplaceOrView below;
  return call_op(logits, target, call);
}

/// The loss of half precision stays in float32 - the logits are read as they are - unless a dtype
/// is asked for. Probabilities of another dtype than the logits meet them in the wider one.
Tensor autocast(const Tensor& logits, const Tensor& target, const LossCall& call) {
  check_tensor(kOp, "logits", logits);
  check_tensor(kOp, "target", target);
  check_same_device(kOp, "target", target, "logits", logits);
  // Of every device: the call must not come back here.
  const c10::impl::ExcludeDispatchKeyGuard outside(c10::autocast_dispatch_keyset);
  LossCall follows = call;
  if (is_half(logits.scalar_type()) && !call.dtype.has_value()) follows.dtype = at::kFloat;
  if (!is_supported_dtype(target.scalar_type()) || !is_supported_dtype(logits.scalar_type()) ||
      target.scalar_type() == logits.scalar_type()) {
    return call_op(logits, target, follows);
  }
  const at::ScalarType wider = at::promote_types(logits.scalar_type(), target.scalar_type());
  return call_op(logits.to(wider), target.to(wider), follows);
}

// The dispatcher passes the arguments one by one.
template <Tensor (*Function)(const Tensor&, const Tensor&, const LossCall&)>
Tensor apart(const Tensor& logits, const Tensor& target, const MaybeTensor& weight,
             int64_t ignore_index, string_view reduction, double label_smoothing, double z_loss,
             MaybeDtype dtype, bool check_target, bool inplace_backward) {
  return Function(logits, target,
                  {weight, ignore_index, find_loss_reduction(kOp, reduction), label_smoothing,
                   z_loss, dtype, check_target, inplace_backward});
}

template <Two (*Function)(const Tensor&, const Tensor&, const LossCall&)>
Two forward_apart(const Tensor& logits, const Tensor& target, const MaybeTensor& weight,
                  int64_t ignore_index, string_view reduction, double label_smoothing,
                  double z_loss, MaybeDtype dtype, bool check_target) {
  return Function(logits, target,
                  {weight, ignore_index, find_loss_reduction(kForwardOp, reduction),
                   label_smoothing, z_loss, dtype, check_target, false});
}

template <Tensor (*Function)(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                             const LossCall&)>
Tensor backward_apart(const Tensor& grad, const Tensor& logits, const Tensor& target,
                      const MaybeTensor& weight, const Tensor& state, int64_t ignore_index,
                      string_view reduction, double label_smoothing, double z_loss) {
  return Function(grad, logits, target, state,
                  {weight, ignore_index, find_loss_reduction(kBackwardOp, reduction),
                   label_smoothing, z_loss, std::nullopt, false, false});
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) {
  m.def(
      "cross_entropy(Tensor logits, Tensor target, *, Tensor? weight=None, int ignore_index=-100, "
      "str reduction='mean', float label_smoothing=0.0, float z_loss=0.0, ScalarType? dtype=None, "
      "bool check_target=False, bool inplace_backward=False) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "cross_entropy_forward(Tensor logits, Tensor target, Tensor? weight, int ignore_index, "
      "str reduction, float label_smoothing, float z_loss, ScalarType? dtype, bool check_target) "
      "-> (Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "cross_entropy_backward(Tensor grad, Tensor logits, Tensor target, Tensor? weight, "
      "Tensor state, int ignore_index, str reduction, float label_smoothing, float z_loss) "
      "-> Tensor",
      {at::Tag::pt2_compliant_tag});
}

// All backends, so that what has no kernel (sparse, other devices) meets our checks and not a
// missing entry.
TORCH_LIBRARY_IMPL(torchkiln, CompositeExplicitAutograd, m) {
  m.impl(kOp, TORCH_FN(apart<real>));
  m.impl(kForwardOp, TORCH_FN(forward_apart<forward_real>));
  m.impl(kBackwardOp, TORCH_FN(backward_apart<backward_real>));
}
TORCH_LIBRARY_IMPL(torchkiln, Meta, m) {
  m.impl(kOp, TORCH_FN(apart<output>));
  m.impl(kForwardOp, TORCH_FN(forward_apart<outputs>));
  m.impl(kBackwardOp, TORCH_FN(backward_apart<backward_output>));
}
TORCH_LIBRARY_IMPL(torchkiln, Autograd, m) { m.impl(kOp, TORCH_FN(apart<autograd>)); }
TORCH_LIBRARY_IMPL(torchkiln, FuncTorchBatched, m) { m.impl(kOp, TORCH_FN(apart<decomposed>)); }
TORCH_LIBRARY_IMPL(torchkiln, AutocastCUDA, m) { m.impl(kOp, TORCH_FN(apart<autocast>)); }
TORCH_LIBRARY_IMPL(torchkiln, AutocastCPU, m) { m.impl(kOp, TORCH_FN(apart<autocast>)); }

}  // namespace torchkiln::cross_entropy_ops

namespace torchkiln {

at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& target,
                         const CrossEntropyOptions& options) {
  return cross_entropy_ops::apart<cross_entropy_ops::call_op>(
      logits, target, options.weight, options.ignore_index, options.reduction,
      options.label_smoothing, options.z_loss, options.dtype, options.check_target,
      options.inplace_backward);
}

}  // namespace torchkiln
