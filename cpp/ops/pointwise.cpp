#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "autograd.h"
#include "elementwise.h"
#include "torchkiln/checks.h"
#include "torchkiln/kernels/pointwise.h"
#include "torchkiln/launch.h"
#include "torchkiln/ops.h"

namespace torchkiln {
namespace {

using at::Tensor;

const auto& add_op() {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("torchkiln::add", "")
                             .typed<Tensor(const Tensor&, const Tensor&)>();
  return op;
}

bool is_cpu_scalar(const Tensor& tensor) { return tensor.dim() == 0 && tensor.is_cpu(); }

/// The dtype of the output.
at::ScalarType check_add(const Tensor& a, const Tensor& b) {
  check_tensor("add", "a", a);
  check_tensor("add", "b", b);
  const bool scalar_beside_cuda =
      a.device() != b.device() && ((is_cpu_scalar(a) && b.is_cuda()) ||  //
                                   (is_cpu_scalar(b) && a.is_cuda()));
  if (!scalar_beside_cuda) check_same_device("add", "b", b, "a", a);
  const at::ScalarType dtype = at::result_type(a, b);
  TORCH_CHECK(is_supported_dtype(dtype), "torchkiln.add: a, b: got dtypes ",
              dtype_name(a.scalar_type()), " and ", dtype_name(b.scalar_type()),
              ", which promote to ", dtype_name(dtype), ", expected ", kSupportedDtypes);

  const c10::SymIntArrayRef a_shape = a.sym_sizes();
  const c10::SymIntArrayRef b_shape = b.sym_sizes();
  if (!a_shape.equals(b_shape)) {
    for (int64_t d = 1; d <= std::min(a.dim(), b.dim()); ++d) {
      const c10::SymInt& a_size = a_shape[a.dim() - d];
      const c10::SymInt& b_size = b_shape[b.dim() - d];
      TORCH_CHECK(a_size == b_size || a_size == 1 || b_size == 1, "torchkiln.add: b: got shape ",
                  b_shape, ", expected one that broadcasts with a of shape ", a_shape);
    }
  }
  return dtype;
}

/// The checked, empty output; on Meta and symbolic tensors, too. It keeps the layout of the first
/// input that has its shape and is dense, as torch's elementwise ops do.
Tensor add_output(const Tensor& a, const Tensor& b) {
  const at::ScalarType dtype = check_add(a, b);
  const c10::SymIntArrayRef a_shape = a.sym_sizes();
  const c10::SymIntArrayRef b_shape = b.sym_sizes();
  const c10::SymDimVector shape = a_shape.equals(b_shape)
                                      ? c10::SymDimVector(a_shape)
                                      : at::infer_size_symdimvector(a_shape, b_shape);
  const at::TensorOptions options = (is_cpu_scalar(a) ? b : a).options().dtype(dtype);
  if (a_shape.equals(shape) && a.is_non_overlapping_and_dense()) return at::empty_like(a, options);
  if (b_shape.equals(shape) && b.is_non_overlapping_and_dense()) return at::empty_like(b, options);
  return at::empty_symint(shape, options);
}

/// An input as the kernels read it: on the output's device and of a dtype they know. A number from
/// the CPU keeps the precision that is computed in, and goes to the device as a kernel's argument,
/// without a wait.
Tensor readable(const Tensor& input, const Tensor& out) {
  if (input.device() != out.device()) {
    const at::ScalarType compute = out.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    return at::full({}, input.item(), out.options().dtype(compute));
  }
  return is_supported_dtype(input.scalar_type()) ? input : input.to(out.scalar_type());
}

Tensor add_real(const Tensor& a, const Tensor& b) {
  Tensor out = add_output(a, b);
  if (out.numel() == 0) return out;
  std::array<Tensor, 2> inputs{readable(a, out), readable(b, out)};
  const Elementwise<2> arguments = describe<2>(out, inputs);
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
  check_add(a, b);
  return at::add(a, b);
}

Tensor add_autograd(c10::DispatchKeySet keys, const Tensor& a, const Tensor& b) {
  if (is_transformed(a, b)) return add_decomposed(a, b);
  if (needs_gradient(a, b)) return AddFunction::apply(a, b);
  const at::AutoDispatchBelowADInplaceOrView below;
  return add_op().redispatch(keys & c10::after_autograd_keyset, a, b);
}

}  // namespace

Tensor add(const Tensor& a, const Tensor& b) { return add_op().call(a, b); }

TORCH_LIBRARY_FRAGMENT(torchkiln, m) {
  m.def("add(Tensor a, Tensor b) -> Tensor", {at::Tag::pt2_compliant_tag});
}

// All backends, so that what has no kernel (sparse, other devices) meets our checks and not a
// missing entry.
TORCH_LIBRARY_IMPL(torchkiln, CompositeExplicitAutograd, m) { m.impl("add", TORCH_FN(add_real)); }
TORCH_LIBRARY_IMPL(torchkiln, Meta, m) { m.impl("add", TORCH_FN(add_output)); }
TORCH_LIBRARY_IMPL(torchkiln, Autograd, m) { m.impl("add", TORCH_FN(add_autograd)); }
TORCH_LIBRARY_IMPL(torchkiln, FuncTorchBatched, m) { m.impl("add", TORCH_FN(add_decomposed)); }

}  // namespace torchkiln
