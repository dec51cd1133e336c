#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "promotion.h"
#include "torchkiln/autograd.h"
#include "torchkiln/elementwise.h"
#include "torchkiln/kernels/muladd.h"
#include "torchkiln/launch.h"
#include "torchkiln/ops.h"

namespace torchkiln::muladd_ops {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kOp = "muladd";
constexpr const char* kBackwardOp = "muladd_backward";

using Two = std::tuple<Tensor, Tensor>;
using Schema = Tensor(const Tensor&, const Tensor&, const Tensor&);
using BackwardSchema = Two(const Tensor&, const Tensor&, const Tensor&);

const auto& op() {
  static const auto found =
      c10::Dispatcher::singleton().findSchemaOrThrow("torchkiln::muladd", "").typed<Schema>();
  return found;
}
const auto& backward_op() {
  static const auto found = c10::Dispatcher::singleton()
                                .findSchemaOrThrow("torchkiln::muladd_backward", "")
                                .typed<BackwardSchema>();
  return found;
}

/// The checked, empty output; on Meta and symbolic tensors, too.
Tensor output(const Tensor& a, const Tensor& b, const Tensor& c) {
  return promoted_output(kOp, {{"a", a}, {"b", b}, {"c", c}});
}

template <class OnCuda, class OnCpu>
void launch_over(const Tensor& out, const OnCuda& on_cuda, const OnCpu& on_cpu) {
  launch(kOp, out, out.numel(), kElementwiseGrain, on_cuda, on_cpu);
}

/// Numbers go to the kernels as arguments.
Tensor real(const Tensor& a, const Tensor& b, const Tensor& c) {
  Tensor out = output(a, b, c);
  if (out.numel() == 0) return out;
  const std::array<Tensor, 1> outs{out};
  const bool b_first = is_cpu_scalar(a) && !is_cpu_scalar(b);
  const Tensor& x = b_first ? b : a;
  const Tensor& y = b_first ? a : b;
  const bool y_is_number = is_cpu_scalar(y), c_is_number = is_cpu_scalar(c);
  if (is_cpu_scalar(x)) {
    if (!c_is_number) {
      const double shift = x.item().toDouble() * y.item().toDouble();
      std::array<Tensor, 1> inputs{readable(c, out)};
      const auto arguments = describe(outs, inputs);
      launch_over(
          out, [&](auto stream) { return cuda::scale_shift(arguments, 1.0, shift, stream); },
          [&](int64_t begin, int64_t end) {
            return cpu::scale_shift(arguments, 1.0, shift, begin, end);
          });
      return out;
    }
  } else if (y_is_number && c_is_number) {
    const double factor = y.item().toDouble(), shift = c.item().toDouble();
    std::array<Tensor, 1> inputs{readable(x, out)};
    const auto arguments = describe(outs, inputs);
    launch_over(
        out, [&](auto stream) { return cuda::scale_shift(arguments, factor, shift, stream); },
        [&](int64_t begin, int64_t end) {
          return cpu::scale_shift(arguments, factor, shift, begin, end);
        });
    return out;
  } else if (y_is_number) {
    const double factor = y.item().toDouble();
    std::array<Tensor, 2> inputs{readable(x, out), readable(c, out)};
    const auto arguments = describe(outs, inputs);
    launch_over(
        out, [&](auto stream) { return cuda::scale_add(arguments, factor, stream); },
        [&](int64_t begin, int64_t end) { return cpu::scale_add(arguments, factor, begin, end); });
    return out;
  } else if (c_is_number) {
    const double shift = c.item().toDouble();
    std::array<Tensor, 2> inputs{readable(x, out), readable(y, out)};
    const auto arguments = describe(outs, inputs);
    launch_over(
        out, [&](auto stream) { return cuda::multiply_shift(arguments, shift, stream); },
        [&](int64_t begin, int64_t end) {
          return cpu::multiply_shift(arguments, shift, begin, end);
        });
    return out;
  }
  std::array<Tensor, 3> inputs{readable(x, out), readable(y, out), readable(c, out)};
  const auto arguments = describe(outs, inputs);
  launch_over(
      out, [&](auto stream) { return cuda::multiply_add(arguments, stream); },
      [&](int64_t begin, int64_t end) { return cpu::multiply_add(arguments, begin, end); });
  return out;
}

/// Empty gradients of a and b, which have the shape and dtype of grad: nothing is broadcast.
Two backward_outputs(const Tensor& grad, const Tensor& a, const Tensor& b) {
  for (const auto& [name, tensor] : {Operand{"a", a}, Operand{"b", b}}) {
    check_tensor(kBackwardOp, name, tensor);
    check_same_device(kBackwardOp, name, tensor, "grad", grad);
    TORCH_CHECK(
        tensor.scalar_type() == grad.scalar_type() && tensor.sym_sizes().equals(grad.sym_sizes()),
        "torchkiln.", kBackwardOp, ": ", name, ": got ", dtype_name(tensor.scalar_type()), " ",
        tensor.sym_sizes(), ", expected ", dtype_name(grad.scalar_type()), " ", grad.sym_sizes(),
        ", as grad");
  }
  check_dtype(kBackwardOp, "grad", grad);
  const auto like = [&](const Tensor& tensor) {
    return tensor.is_non_overlapping_and_dense()
               ? at::empty_like(tensor)
               : at::empty_symint(tensor.sym_sizes(), tensor.options());
  };
  return {like(a), like(b)};
}

Two backward_real(const Tensor& grad, const Tensor& a, const Tensor& b) {
  auto [grad_a, grad_b] = backward_outputs(grad, a, b);
  if (grad.numel() == 0) return {grad_a, grad_b};
  std::array<Tensor, 3> inputs{grad, a, b};
  const Elementwise<3, 2> arguments = describe(std::array<Tensor, 2>{grad_a, grad_b}, inputs);
  launch(
      kBackwardOp, grad, grad.numel(), kElementwiseGrain,
      [&](auto stream) { return cuda::multiply_gradient(arguments, stream); },
      [&](int64_t begin, int64_t end) { return cpu::multiply_gradient(arguments, begin, end); });
  return {grad_a, grad_b};
}

struct MuladdFunction : torch::autograd::Function<MuladdFunction> {
  static Tensor forward(AutogradContext* context, const Tensor& a, const Tensor& b,
                        const Tensor& c) {
    const at::AutoDispatchBelowADInplaceOrView below;
    context->save_for_backward(
        {b.requires_grad() || a.requires_grad() ? a : Tensor(), a.requires_grad() ? b : Tensor()});
    context->saved_data["product_shape"] =
        c10::IValue(c10::SymIntArrayRef(at::infer_size_symdimvector(a.sym_sizes(), b.sym_sizes())));
    return op().call(a, b, c);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    // The engine sums a gradient over broadcast dimensions and casts it to the input's dtype.
    const variable_list saved = context->get_saved_variables();
    const Tensor& grad = grads[0];
    const bool wants_a = context->needs_input_grad(0), wants_b = context->needs_input_grad(1);
    const auto as_grad = [&](const Tensor& tensor) {
      return tensor.scalar_type() == grad.scalar_type() &&
             tensor.sym_sizes().equals(grad.sym_sizes());
    };
    Tensor grad_a, grad_b;
    if (wants_a && wants_b && !at::GradMode::is_enabled() && as_grad(saved[0]) &&
        as_grad(saved[1])) {
      std::tie(grad_a, grad_b) = backward_op().call(grad, saved[0], saved[1]);
    } else {
      // Where c alone is wider the sum comes before the products: fewer of them, none rounded.
      const std::vector<c10::SymInt> shape = context->saved_data["product_shape"].toSymIntVector();
      const Tensor narrow = at::sum_to(grad, c10::SymIntArrayRef(shape));
      if (wants_a) grad_a = narrow * saved[1];
      if (wants_b) grad_b = narrow * saved[0];
    }
    return {grad_a, grad_b, context->needs_input_grad(2) ? grad : Tensor()};
  }
};

/// In torch's own ops and the op's own precision: for transforms that have no kernel here.
Tensor decomposed(const Tensor& a, const Tensor& b, const Tensor& c) {
  const Operands operands{{"a", a}, {"b", b}, {"c", c}};
  const at::ScalarType dtype = check_promotion(kOp, operands);
  check_broadcast(kOp, operands);
  const at::ScalarType compute = compute_dtype(dtype);
  return (a.to(compute) * b.to(compute) + c.to(compute)).to(dtype);
}

Tensor autograd(c10::DispatchKeySet keys, const Tensor& a, const Tensor& b, const Tensor& c) {
  if (is_transformed(a, b, c)) return decomposed(a, b, c);
  if (needs_gradient(a, b, c)) return MuladdFunction::apply(a, b, c);
  const at::AutoDispatchBelowADInplaceOrView below;
  return op().redispatch(keys & c10::after_autograd_keyset, a, b, c);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) {
  m.def("muladd(Tensor a, Tensor b, Tensor c) -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def("muladd_backward(Tensor grad, Tensor a, Tensor b) -> (Tensor, Tensor)",
        {at::Tag::pt2_compliant_tag});
}

// All backends, so that what has no kernel (sparse, other devices) meets our checks and not a
// missing entry.
TORCH_LIBRARY_IMPL(torchkiln, CompositeExplicitAutograd, m) {
  m.impl(kOp, TORCH_FN(real));
  m.impl(kBackwardOp, TORCH_FN(backward_real));
}
TORCH_LIBRARY_IMPL(torchkiln, Meta, m) {
  m.impl(kOp, TORCH_FN(output));
  m.impl(kBackwardOp, TORCH_FN(backward_outputs));
}
TORCH_LIBRARY_IMPL(torchkiln, Autograd, m) { m.impl(kOp, TORCH_FN(autograd)); }
TORCH_LIBRARY_IMPL(torchkiln, FuncTorchBatched, m) { m.impl(kOp, TORCH_FN(decomposed)); }

}  // namespace torchkiln::muladd_ops

namespace torchkiln {

at::Tensor muladd(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c) {
  return muladd_ops::op().call(a, b, c);
}

}  // namespace torchkiln
