#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "promotion.h"
#include "torchkiln/autograd.h"
#include "torchkiln/elementwise.h"
#include "torchkiln/kernels/pointwise.h"
#include "torchkiln/launch.h"
#include "torchkiln/ops.h"

namespace torchkiln::pointwise_ops {
namespace {

using at::Tensor;

const auto& add_op() {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("torchkiln::add", "")
                             .typed<Tensor(const Tensor&, const Tensor&)>();
  return op;
}

/// The checked, empty output; on Meta and symbolic tensors, too.
Tensor add_output(const Tensor& a, const Tensor& b) {
  return promoted_output("add", {{"a", a}, {"b", b}});
}

Tensor add_real(const Tensor& a, const Tensor& b) {
  Tensor out = add_output(a, b);
  if (out.numel() == 0) return out;
  std::array<Tensor, 2> inputs{readable(a, out), readable(b, out)};
  const Elementwise<2> arguments = describe(std::array<Tensor, 1>{out}, inputs);
  launch(
      "add", out, out.numel(), kElementwiseGrain,
      [&](auto stream) { return cuda::add(arguments, stream); },
      [&](int64_t begin, int64_t end) { return cpu::add(arguments, begin, end); });
  return out;
}

struct AddFunction : torch::autograd::Function<AddFunction> {
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& a, const Tensor& b) {
    const at::AutoDispatchBelowADInplaceOrView below;
    return torchkiln::add(a, b);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& grads) {
    // The engine sums a gradient over broadcast dimensions and casts it to the input's dtype.
    return {grads[0], grads[0]};
  }
};

/// For transforms that have no kernel here.
Tensor add_decomposed(const Tensor& a, const Tensor& b) {
  check_promotion("add", {{"a", a}, {"b", b}});
  check_broadcast("add", {{"a", a}, {"b", b}});
  return at::add(a, b);
}

Tensor add_autograd(c10::DispatchKeySet keys, const Tensor& a, const Tensor& b) {
  if (is_transformed(a, b)) return add_decomposed(a, b);
  if (needs_gradient(a, b)) return AddFunction::apply(a, b);
  const at::AutoDispatchBelowADInplaceOrView below;
  return add_op().redispatch(keys & c10::after_autograd_keyset, a, b);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) {
  m.def("add(Tensor a, Tensor b) -> Tensor", {at::Tag::pt2_compliant_tag});
}

// All backends, so that what has no kernel (sparse, other devices) meets our checks and not a
// missing entry.
TORCH_LIBRARY_IMPL(torchkiln, CompositeExplicitAutograd, m) { m.impl("add", TORCH_FN(add_real)); }
TORCH_LIBRARY_IMPL(torchkiln, Meta, m) { m.impl("add", TORCH_FN(add_output)); }
TORCH_LIBRARY_IMPL(torchkiln, Autograd, m) { m.impl("add", TORCH_FN(add_autograd)); }
TORCH_LIBRARY_IMPL(torchkiln, FuncTorchBatched, m) { m.impl("add", TORCH_FN(add_decomposed)); }

}  // namespace torchkiln::pointwise_ops

namespace torchkiln {

at::Tensor add(const at::Tensor& a, const at::Tensor& b) {
  return pointwise_ops::add_op().call(a, b);
}

}  // namespace torchkiln
