#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "matmul.h"
#include "torchkiln/autograd.h"
#include "torchkiln/checks.h"
#include "torchkiln/ops.h"

namespace torchkiln::matmul_ops {
namespace {

using at::Tensor;
using c10::SymInt;
using c10::SymIntArrayRef;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kOp = "matmul";

using Schema = Tensor(const Tensor&, const Tensor&);

const auto& op() {
  static const auto found = find_op<Schema>("torchkiln::matmul");
  return found;
}

/// As matrices: a vector on the left is a row, one on the right a column.
Tensor as_rows(const Tensor& a) { return a.dim() == 1 ? a.unsqueeze(0) : a; }
Tensor as_columns(const Tensor& b) { return b.dim() == 1 ? b.unsqueeze(1) : b; }

/// All sizes but the last two.
SymIntArrayRef batch_of(const Tensor& matrices) {
  return matrices.sym_sizes().slice(0, matrices.dim() - 2);
}

void check_batches(const Tensor& a, const Tensor& b) {
  const SymIntArrayRef left = batch_of(a);
  const SymIntArrayRef right = batch_of(b);
  for (size_t d = 1; d <= std::min(left.size(), right.size()); ++d) {
    const SymInt& of_a = left[left.size() - d];
    const SymInt& of_b = right[right.size() - d];
    TORCH_CHECK(of_a == of_b || of_a == 1 || of_b == 1, "torchkiln.", kOp, ": b: got shape ",
                b.sym_sizes(), ", expected leading sizes that broadcast with a of shape ",
                a.sym_sizes());
  }
}

/// The sizes of the output, matrices even where an argument is a vector, of checked arguments.
c10::SymDimVector checked(const Tensor& a, const Tensor& b) {
  check_tensor(kOp, "a", a);
  check_tensor(kOp, "b", b);
  check_same_device(kOp, "b", b, "a", a);
  check_dtype(kOp, "a", a);
  TORCH_CHECK(b.scalar_type() == a.scalar_type(), "torchkiln.", kOp, ": b: got dtype ",
              dtype_name(b.scalar_type()), ", expected ", dtype_name(a.scalar_type()),
              ", the dtype of a");
  TORCH_CHECK(a.dim() >= 1, "torchkiln.", kOp,
              ": a: got a 0-dimensional tensor, expected at least 1 dimension; multiply with *");
  TORCH_CHECK(b.dim() >= 1, "torchkiln.", kOp,
              ": b: got a 0-dimensional tensor, expected at least 1 dimension; multiply with *");
  const Tensor rows = as_rows(a);
  const Tensor columns = as_columns(b);
  TORCH_CHECK(columns.sym_size(-2) == rows.sym_size(-1), "torchkiln.", kOp, ": b: got shape ",
              b.sym_sizes(), ", expected ", rows.sym_size(-1), " in dimension ",
              b.dim() == 1 ? -1 : -2, ", the last size of a");
  check_batches(rows, columns);
  c10::SymDimVector sizes = at::infer_size_symdimvector(batch_of(rows), batch_of(columns));
  sizes.push_back(rows.sym_size(-2));
  sizes.push_back(columns.sym_size(-1));
  return sizes;
}

Tensor matrices_output(const Tensor& a, const Tensor& b) {
  const c10::SymDimVector sizes = checked(a, b);
  return at::empty_symint(sizes, a.options().memory_format(at::MemoryFormat::Contiguous));
}

/// Without the dimensions that the vectors among the arguments did not have.
Tensor without_added(const Tensor& out, const Tensor& a, const Tensor& b) {
  c10::SymDimVector sizes(batch_of(out));
  if (a.dim() > 1) sizes.push_back(out.sym_size(-2));
  if (b.dim() > 1) sizes.push_back(out.sym_size(-1));
  return out.view_symint(sizes);
}

Tensor output(const Tensor& a, const Tensor& b) {
  return without_added(matrices_output(a, b), a, b);
}

/// [batch, rows, columns]; one matrix for all stays one.
Tensor as_batch(const Tensor& matrices, at::IntArrayRef batch) {
  const int64_t rows = matrices.size(-2);
  const int64_t columns = matrices.size(-1);
  const auto own = matrices.sizes().slice(0, matrices.dim() - 2);
  if (c10::multiply_integers(own) == 1) return matrices.reshape({1, rows, columns});
  std::vector<int64_t> sizes(batch.begin(), batch.end());
  sizes.insert(sizes.end(), {rows, columns});
  return matrices.expand(sizes).reshape({c10::multiply_integers(batch), rows, columns});
}

/// a [batch or 1, m, k], b [batch or 1, k, n], out [batch, m, n]. By torch's product: choose()
/// takes a kernel of ours for what is fused to it alone.
void multiply(const Tensor& a, const Tensor& b, Tensor out) {
  const int64_t batch = out.size(0);
  at::bmm_out(out, a.expand({batch, -1, -1}), b.expand({batch, -1, -1}));
}

Tensor real(const Tensor& a, const Tensor& b) {
  checked(a, b);
  if (a.dim() == 2 && b.dim() == 2) return at::mm(a, b);
  const Tensor out = matrices_output(a, b);
  if (out.numel() > 0) {
    const Tensor rows = as_rows(a);
    const Tensor columns = as_columns(b);
    if (columns.dim() == 2) {
      // One product of many rows.
      Tensor flat = out.flatten(0, -2);
      at::mm_out(flat, rows.flatten(0, -2), columns);
    } else {
      const auto batch = out.sizes().slice(0, out.dim() - 2);
      multiply(as_batch(rows, batch), as_batch(columns, batch), out.flatten(0, -3));
    }
  }
  return without_added(out, a, b);
}

/// Matrices of a batch, repeated for those that it broadcasts to, as one with all their rows.
Tensor flat_rows(const Tensor& matrices, SymIntArrayRef batch) {
  c10::SymDimVector sizes(batch);
  sizes.push_back(matrices.sym_size(-2));
  sizes.push_back(matrices.sym_size(-1));
  return as_matrix(matrices.expand_symint(sizes));
}

/// Gradients of a product of matrices, for the arguments of these sizes. Where one matrix served a
/// whole batch, the sum over the batch is one over more terms, and is rounded once.
Tensor gradient_of_a(const Tensor& grad, const Tensor& b, SymIntArrayRef sizes) {
  const Tensor columns = as_columns(b);
  if (sizes.size() > 2) return at::sum_to(torchkiln::matmul(grad, columns.mT()), sizes);
  const SymIntArrayRef batch = batch_of(grad);
  return torchkiln::matmul(flat_rows(grad.mT(), batch).t(), flat_rows(columns.mT(), batch))
      .reshape_symint(sizes);
}
Tensor gradient_of_b(const Tensor& grad, const Tensor& a, SymIntArrayRef sizes) {
  const Tensor rows = as_rows(a);
  if (sizes.size() > 2) return at::sum_to(torchkiln::matmul(rows.mT(), grad), sizes);
  const SymIntArrayRef batch = batch_of(grad);
  return torchkiln::matmul(flat_rows(rows, batch).t(), flat_rows(grad, batch))
      .reshape_symint(sizes);
}

struct MatmulFunction : torch::autograd::Function<MatmulFunction> {
  static Tensor forward(AutogradContext* context, const Tensor& a, const Tensor& b) {
    const at::AutoDispatchBelowADInplaceOrView below;
    // Each is needed for the gradient of the other one.
    context->save_for_backward(
        {b.requires_grad() ? a : Tensor(), a.requires_grad() ? b : Tensor()});
    context->saved_data["a"] = a.sym_sizes();
    context->saved_data["b"] = b.sym_sizes();
    return op().call(a, b);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const variable_list saved = context->get_saved_variables();
    const std::vector<SymInt> of_a = context->saved_data["a"].toSymIntVector();
    const std::vector<SymInt> of_b = context->saved_data["b"].toSymIntVector();
    Tensor grad = grads[0];
    if (of_b.size() == 1) grad = grad.unsqueeze(-1);
    if (of_a.size() == 1) grad = grad.unsqueeze(-2);
    Tensor grad_a, grad_b;
    if (context->needs_input_grad(0)) grad_a = gradient_of_a(grad, saved[1], of_a);
    if (context->needs_input_grad(1)) grad_b = gradient_of_b(grad, saved[0], of_b);
    return {grad_a, grad_b};
  }
};

/// The op in torch's own, for transforms that have no kernel here.
Tensor decomposed(const Tensor& a, const Tensor& b) {
  checked(a, b);
  return at::matmul(a, b);
}

Tensor autograd(c10::DispatchKeySet keys, const Tensor& a, const Tensor& b) {
  if (is_transformed(a, b)) return decomposed(a, b);
  if (needs_gradient(a, b)) return MatmulFunction::apply(a, b);
  const at::AutoDispatchBelowADInplaceOrView below;
  return op().redispatch(keys & c10::after_autograd_keyset, a, b);
}

/// As torch.matmul: both go to the autocast dtype.
Tensor autocast(const Tensor& a, const Tensor& b) {
  check_tensor(kOp, "a", a);
  check_tensor(kOp, "b", b);
  check_same_device(kOp, "b", b, "a", a);
  // Of every device: the call must not come back here.
  const c10::impl::ExcludeDispatchKeyGuard outside(c10::autocast_dispatch_keyset);
  const at::DeviceType device = a.device().type();
  const at::ScalarType dtype = at::autocast::get_autocast_dtype(device);
  return torchkiln::matmul(at::autocast::cached_cast(dtype, a, device),
                           at::autocast::cached_cast(dtype, b, device));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) {
  m.def("matmul(Tensor a, Tensor b) -> Tensor", {at::Tag::pt2_compliant_tag});
}

// All backends, so that what has no kernel (sparse, other devices) meets our checks and not a
// missing entry.
TORCH_LIBRARY_IMPL(torchkiln, CompositeExplicitAutograd, m) { m.impl(kOp, TORCH_FN(real)); }
TORCH_LIBRARY_IMPL(torchkiln, Meta, m) { m.impl(kOp, TORCH_FN(output)); }
TORCH_LIBRARY_IMPL(torchkiln, Autograd, m) { m.impl(kOp, TORCH_FN(autograd)); }
TORCH_LIBRARY_IMPL(torchkiln, FuncTorchBatched, m) { m.impl(kOp, TORCH_FN(decomposed)); }
TORCH_LIBRARY_IMPL(torchkiln, AutocastCPU, m) { m.impl(kOp, TORCH_FN(autocast)); }
TORCH_LIBRARY_IMPL(torchkiln, AutocastCUDA, m) { m.impl(kOp, TORCH_FN(autocast)); }

}  // namespace torchkiln::matmul_ops

namespace torchkiln {

at::Tensor matmul(const at::Tensor& a, const at::Tensor& b) { return matmul_ops::op().call(a, b); }

}  // namespace torchkiln
