#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "activations.h"
#include "torchkiln/autograd.h"
#include "torchkiln/checks.h"
#include "torchkiln/elementwise.h"
#include "torchkiln/kernels/activation.h"
#include "torchkiln/launch.h"
#include "torchkiln/ops.h"

namespace torchkiln::activation_ops {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Those that are ops of their own, and those of them that torch has in place.
using Ops = TypeList<Square, Relu, Gelu, GeluTanh, Silu, Sigmoid, Tanh>;
using InPlaceOps = TypeList<Square, Relu, Silu, Sigmoid, Tanh>;

constexpr const char* kBackwardOp = "activation_backward";

using BackwardSchema = Tensor(const Tensor&, const Tensor&, c10::string_view);

const auto& backward_op() {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("torchkiln::activation_backward", "")
                             .typed<BackwardSchema>();
  return op;
}

void check_input(const char* op, const Tensor& x) {
  check_tensor(op, "x", x);
  check_dtype(op, "x", x);
}

/// Empty, with the layout of `x` where that is dense, as torch's own elementwise ops give; on Meta
/// and symbolic tensors, too.
Tensor output_like(const Tensor& x) {
  return x.is_non_overlapping_and_dense() ? at::empty_like(x)
                                          : at::empty_symint(x.sym_sizes(), x.options());
}

Tensor backward_output(const Tensor& grad, const Tensor& saved, c10::string_view act) {
  find_activation(kBackwardOp, act);
  check_input(kBackwardOp, grad);
  check_tensor(kBackwardOp, "saved", saved);
  check_same_device(kBackwardOp, "saved", saved, "grad", grad);
  TORCH_CHECK(saved.scalar_type() == grad.scalar_type(), "torchkiln.", kBackwardOp,
              ": saved: got dtype ", dtype_name(saved.scalar_type()), ", expected ",
              dtype_name(grad.scalar_type()), ", the dtype of grad");
  TORCH_CHECK(grad.sym_sizes().equals(saved.sym_sizes()), "torchkiln.", kBackwardOp,
              ": saved: got shape ", saved.sym_sizes(), ", expected ", grad.sym_sizes(),
              ", the shape of grad");
  return output_like(saved);
}

Tensor backward_real(const Tensor& grad, const Tensor& saved, c10::string_view act) {
  Tensor out = backward_output(grad, saved, act);
  if (out.numel() == 0) return out;
  const Activation activation = find_activation(kBackwardOp, act);
  std::array<Tensor, 2> inputs{grad, saved};
  const Elementwise<2> arguments = describe(std::array<Tensor, 1>{out}, inputs);
  launch(
      kBackwardOp, out, out.numel(), kElementwiseGrain,
      [&](auto stream) { return cuda::activation_backward(arguments, activation, stream); },
      [&](int64_t begin, int64_t end) {
        return cpu::activation_backward(arguments, activation, begin, end);
      });
  return out;
}

variable_list gradients(AutogradContext* context, const Tensor& grad) {
  const Tensor saved = context->get_saved_variables()[0];
  const auto activation = static_cast<Activation>(context->saved_data["activation"].toInt());
  if (!at::GradMode::is_enabled())
    return {backward_op().call(grad, saved, name_of(activation)), Tensor(), Tensor()};
  const at::ScalarType compute = compute_dtype(grad.scalar_type());
  const Tensor wide = composite_of(activation).gradient(grad.to(compute), saved.to(compute));
  return {wide.to(grad.scalar_type()), Tensor(), Tensor()};
}

/// In torch's own ops and the op's own precision: for transforms that have no kernel here.
Tensor composite_value(Activation activation, const Tensor& x) {
  return composite_of(activation).value(x.to(compute_dtype(x.scalar_type()))).to(x.scalar_type());
}

Tensor call_below_autograd(Activation activation, const Tensor& x);
Tensor& call_in_place_below_autograd(Activation activation, Tensor& x);

struct ActivationFunction : torch::autograd::Function<ActivationFunction> {
  static Tensor forward(AutogradContext* context, const Tensor& x, int64_t activation) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto which = static_cast<Activation>(activation);
    Tensor output = call_below_autograd(which, x);
    context->saved_data["activation"] = activation;
    context->save_for_backward({saved_by(which) == Saved::input ? x : output});
    return output;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    variable_list found = gradients(context, grads[0]);
    found.pop_back();
    return found;
  }
};

/// `input` is a copy of x from before, where the derivative needs it: an argument of its own, so
/// that a second derivative finds the way on from it.
struct InPlaceFunction : torch::autograd::Function<InPlaceFunction> {
  static Tensor forward(AutogradContext* context, Tensor x, const std::optional<Tensor>& input,
                        int64_t activation) {
    const at::AutoDispatchBelowADInplaceOrView below;
    call_in_place_below_autograd(static_cast<Activation>(activation), x);
    context->mark_dirty({x});  // counts the version up, too
    context->saved_data["activation"] = activation;
    context->save_for_backward({input.value_or(x)});
    return x;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    return gradients(context, grads[0]);
  }
};

/// The op of one activation.
template <class Act>
struct Op {
  static std::string name() { return Act::kName; }

  static const auto& handle() {
    static const auto op =
        c10::Dispatcher::singleton()
            .findSchemaOrThrow((std::string("torchkiln::") + Act::kName).c_str(), "")
            .template typed<Tensor(const Tensor&)>();
    return op;
  }

  static Tensor meta(const Tensor& x) {
    check_input(Act::kName, x);
    return output_like(x);
  }

  static Tensor real(const Tensor& x) {
    Tensor out = meta(x);
    run_activation(Act::kName, kActivation<Act>, out, x);
    return out;
  }

  static Tensor decomposed(const Tensor& x) {
    check_input(Act::kName, x);
    return composite_value(kActivation<Act>, x);
  }

  static Tensor autograd(c10::DispatchKeySet keys, const Tensor& x) {
    if (is_transformed(x)) return decomposed(x);
    if (needs_gradient(x))
      return ActivationFunction::apply(x, static_cast<int64_t>(kActivation<Act>));
    const at::AutoDispatchBelowADInplaceOrView below;
    return handle().redispatch(keys & c10::after_autograd_keyset, x);
  }
};

/// The same in place.
template <class Act>
struct InPlaceOp {
  static const std::string& name() {
    static const std::string name = std::string(Act::kName) + "_";
    return name;
  }

  static const auto& handle() {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow(("torchkiln::" + name()).c_str(), "")
                               .template typed<Tensor&(Tensor&)>();
    return op;
  }

  static void check(const Tensor& x) {
    check_input(name().c_str(), x);
    at::assert_no_internal_overlap(x);
  }

  static Tensor& meta(Tensor& x) {
    check(x);
    return x;
  }

  static Tensor& real(Tensor& x) {
    check(x);
    if (x.dim() > kMaxRank && !x.is_non_overlapping_and_dense()) {
      x.copy_(Op<Act>::real(x));  // more dimensions with gaps than a layout holds
    } else {
      run_activation(name().c_str(), kActivation<Act>, x, x);
    }
    return x;
  }

  static Tensor& decomposed(Tensor& x) {
    check_input(name().c_str(), x);
    return x.copy_(composite_value(kActivation<Act>, x));
  }

  static Tensor& autograd(c10::DispatchKeySet keys, Tensor& x) {
    if (is_transformed(x)) return decomposed(x);
    if (needs_gradient(x)) {
      check(x);
      torch::autograd::check_inplace(x, /*requires_grad=*/true);
      std::optional<Tensor> input;
      if (Act::kSaved == Saved::input) input = x.clone();
      InPlaceFunction::apply(x, input, static_cast<int64_t>(kActivation<Act>));
      return x;
    }
    const at::AutoDispatchBelowAutograd below;
    return handle().redispatch(keys & c10::after_autograd_keyset, x);
  }

  static Tensor& count_version(c10::DispatchKeySet keys, Tensor& x) {
    {
      const at::AutoDispatchBelowADInplaceOrView below;
      handle().redispatch(keys & c10::after_ADInplaceOrView_keyset, x);
    }
    torch::autograd::increment_version(x);
    return x;
  }
};

Tensor call_below_autograd(Activation activation, const Tensor& x) {
  Tensor out;
  with_activation(
      activation, [&](auto tag) { out = Op<typename decltype(tag)::type>::handle().call(x); },
      Ops{});
  return out;
}

Tensor& call_in_place_below_autograd(Activation activation, Tensor& x) {
  with_activation(
      activation, [&](auto tag) { InPlaceOp<typename decltype(tag)::type>::handle().call(x); },
      InPlaceOps{});
  return x;
}

template <class Body, class... Functors>
bool is_one_of(const Body& name, TypeList<Functors...>) {
  return ((name == Functors::kName) || ...);
}

}  // namespace

}  // namespace torchkiln::activation_ops

namespace torchkiln {

void run_activation(const char* op, Activation activation, const at::Tensor& out,
                    const at::Tensor& x, bool overlaps) {
  if (out.numel() == 0) return;
  std::array<at::Tensor, 1> inputs{x};
  Elementwise<1> arguments = describe(std::array<at::Tensor, 1>{out}, inputs);
  arguments.overlaps = overlaps;
  launch(
      op, out, out.numel(), kElementwiseGrain,
      [&](auto stream) { return cuda::activation(arguments, activation, stream); },
      [&](int64_t begin, int64_t end) {
        return cpu::activation(arguments, activation, begin, end);
      });
}

at::Tensor activation(const at::Tensor& x, c10::string_view act) {
  const Activation found = find_activation("activation", act);
  if (found == kActivation<None>) return x;
  at::Tensor out;
  with_activation(
      found,
      [&](auto tag) { out = activation_ops::Op<typename decltype(tag)::type>::handle().call(x); },
      activation_ops::Ops{});
  return out;
}

at::Tensor& activation_(at::Tensor& x, c10::string_view act) {
  const Activation found = find_activation("activation_", act);
  TORCH_CHECK_VALUE(activation_ops::is_one_of(act, activation_ops::InPlaceOps{}),
                    "torchkiln.activation_: act: got '", act,
                    "', expected one that torch has in place, too");
  return activation_ops::call_in_place_below_autograd(found, x);
}

}  // namespace torchkiln

namespace torchkiln::activation_ops {
namespace {

/// Calls body(Op<Functor>{}) for each op, and in_place(InPlaceOp<Functor>{}) for each in place.
template <class Body, class InPlaceBody>
void for_each_op(const Body& body, const InPlaceBody& in_place) {
  for_each_activation([&](auto tag) { body(Op<typename decltype(tag)::type>{}); }, Ops{});
  for_each_activation([&](auto tag) { in_place(InPlaceOp<typename decltype(tag)::type>{}); },
                      InPlaceOps{});
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) {
  for_each_op(
      [&](auto op) {
        m.def((op.name() + "(Tensor x) -> Tensor").c_str(), {at::Tag::pt2_compliant_tag});
      },
      [&](auto op) {
        m.def((op.name() + "(Tensor(a!) x) -> Tensor(a!)").c_str(), {at::Tag::pt2_compliant_tag});
      });
  m.def("activation_backward(Tensor grad, Tensor saved, str act) -> Tensor",
        {at::Tag::pt2_compliant_tag});
}

// All backends, so that what has no kernel (sparse, other devices) meets our checks and not a
// missing entry.
TORCH_LIBRARY_IMPL(torchkiln, CompositeExplicitAutograd, m) {
  const auto impl = [&](auto op) { m.impl(op.name().c_str(), TORCH_FN(decltype(op)::real)); };
  for_each_op(impl, impl);
  m.impl(kBackwardOp, TORCH_FN(backward_real));
}
TORCH_LIBRARY_IMPL(torchkiln, Meta, m) {
  const auto impl = [&](auto op) { m.impl(op.name().c_str(), TORCH_FN(decltype(op)::meta)); };
  for_each_op(impl, impl);
  m.impl(kBackwardOp, TORCH_FN(backward_output));
}
TORCH_LIBRARY_IMPL(torchkiln, Autograd, m) {
  const auto impl = [&](auto op) { m.impl(op.name().c_str(), TORCH_FN(decltype(op)::autograd)); };
  for_each_op(impl, impl);
}
TORCH_LIBRARY_IMPL(torchkiln, ADInplaceOrView, m) {
  for_each_op([](auto) {},
              [&](auto op) { m.impl(op.name().c_str(), TORCH_FN(decltype(op)::count_version)); });
}
TORCH_LIBRARY_IMPL(torchkiln, FuncTorchBatched, m) {
  const auto impl = [&](auto op) { m.impl(op.name().c_str(), TORCH_FN(decltype(op)::decomposed)); };
  for_each_op(impl, impl);
}

}  // namespace torchkiln::activation_ops
