#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "spmm.h"
#include "torchkiln/autograd.h"
#include "torchkiln/checks.h"
#include "torchkiln/ops.h"

namespace torchkiln::spmm_autograd_ops {
namespace {

using at::Tensor;
using c10::SymInt;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

const auto& csr_op() {
  static const auto found = find_op<SpmmSchema>("torchkiln::spmm_csr");
  return found;
}
const auto& transposed_op() {
  static const auto found = find_op<SpmmTransposedSchema>("torchkiln::spmm_transposed");
  return found;
}
const auto& sampled_op() {
  static const auto found = find_op<SpmmSampledSchema>("torchkiln::spmm_sampled");
  return found;
}
const auto& transpose_op() {
  static const auto found = find_op<SpmmTransposeSchema>("torchkiln::spmm_transpose");
  return found;
}

/// The pattern of a call, and the transposed one, where it is given or once it is asked for.
struct Pattern {
  Tensor crow;
  Tensor col;
  Tensor transpose;

  const Tensor& transposed(const SymInt& columns) {
    if (!transpose.defined()) transpose = transpose_op().call(crow, col, columns);
    return transpose;
  }
  MaybeTensor maybe_transpose() const {
    return transpose.defined() ? MaybeTensor(transpose) : std::nullopt;
  }

  Tensor product(const Tensor& values, const Tensor& b) const {
    return csr_op().call(values, b, crow, col, std::nullopt, maybe_transpose(), /*check=*/false);
  }
  Tensor transposed_product(const Tensor& values, const Tensor& x, const SymInt& columns) {
    return transposed_op().call(crow, col, values, x, transposed(columns));
  }
  /// For values of this rank: summed over the batch where all matrices share them.
  Tensor sampled(const Tensor& left, const Tensor& right, int64_t rank) const {
    return sampled_op().call(crow, col, left, right, maybe_transpose(), /*summed=*/rank == 1);
  }
};

/// A gradient for a tensor of this shape: the batch shares the tensor, or the gradient.
Tensor fit(const Tensor& grad, c10::SymIntArrayRef shape) {
  const auto rank = static_cast<int64_t>(shape.size());
  if (grad.dim() > rank) return grad.sum(0);
  return grad.dim() < rank ? grad.expand_symint(shape) : grad;
}

/// multiply(values, x) as the gradient of `dense`. What is summed over a batch is not rounded
/// before.
template <class Multiply>
Tensor dense_gradient(const Pattern& pattern, const Tensor& dense, const Tensor& values,
                      const Tensor& x, const Multiply& multiply) {
  const at::ScalarType dtype = dense.scalar_type();
  const bool has_batch = values.dim() == 2 || x.dim() == 3 || pattern.crow.dim() == 2;
  if (dense.dim() == 3 || !has_batch || !is_half(dtype))
    return fit(multiply(values, x), dense.sym_sizes());
  return fit(multiply(values.to(at::kFloat), x.to(at::kFloat)), dense.sym_sizes()).to(dtype);
}

/// What a call keeps for backward, and its gradients, recorded only where they are to be
/// differentiated again.
template <class Gradients>
variable_list backward_of(AutogradContext* context, const Gradients& gradients) {
  const variable_list saved = context->get_saved_variables();
  Pattern pattern{saved[0], saved[1], saved[4]};
  if (at::GradMode::is_enabled()) return gradients(pattern, saved[2], saved[3]);
  const at::AutoDispatchBelowADInplaceOrView below;
  return gradients(pattern, saved[2], saved[3]);
}

struct Product : torch::autograd::Function<Product> {
  static Tensor forward(AutogradContext* context, const Tensor& values, const Tensor& b,
                        const Tensor& crow, const Tensor& col, at::OptionalSymIntArrayRef shape,
                        const MaybeTensor& transpose, bool check) {
    const at::AutoDispatchBelowADInplaceOrView below;
    context->save_for_backward({crow, col, values, b, transpose.value_or(Tensor())});
    return csr_op().call(values, b, crow, col, shape, transpose, check);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const Tensor& grad = grads[0];
    return backward_of(context, [&](Pattern& pattern, const Tensor& values, const Tensor& b) {
      variable_list found(7);
      if (context->needs_input_grad(0))
        found[0] = fit(pattern.sampled(grad, b, values.dim()), values.sym_sizes());
      if (context->needs_input_grad(1)) {
        found[1] = dense_gradient(pattern, b, values, grad, [&](const Tensor& v, const Tensor& x) {
          return pattern.transposed_product(v, x, b.sym_size(-2));
        });
      }
      return found;
    });
  }
};

struct TransposedProduct : torch::autograd::Function<TransposedProduct> {
  static Tensor forward(AutogradContext* context, const Tensor& crow, const Tensor& col,
                        const Tensor& values, const Tensor& x, const Tensor& transpose) {
    const at::AutoDispatchBelowADInplaceOrView below;
    context->save_for_backward({crow, col, values, x, transpose});
    return transposed_op().call(crow, col, values, x, transpose);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const Tensor& grad = grads[0];
    return backward_of(context, [&](Pattern& pattern, const Tensor& values, const Tensor& x) {
      variable_list found(5);
      if (context->needs_input_grad(2))
        found[2] = fit(pattern.sampled(x, grad, values.dim()), values.sym_sizes());
      if (context->needs_input_grad(3)) {
        found[3] = dense_gradient(pattern, x, values, grad, [&](const Tensor& v, const Tensor& g) {
          return pattern.product(v, g);
        });
      }
      return found;
    });
  }
};

struct SampledProduct : torch::autograd::Function<SampledProduct> {
  static Tensor forward(AutogradContext* context, const Tensor& crow, const Tensor& col,
                        const Tensor& left, const Tensor& right, const MaybeTensor& transpose,
                        bool summed) {
    const at::AutoDispatchBelowADInplaceOrView below;
    context->save_for_backward({crow, col, left, right, transpose.value_or(Tensor())});
    return sampled_op().call(crow, col, left, right, transpose, summed);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const Tensor& grad = grads[0];
    return backward_of(context, [&](Pattern& pattern, const Tensor& left, const Tensor& right) {
      variable_list found(6);
      if (context->needs_input_grad(2)) {
        found[2] =
            dense_gradient(pattern, left, grad, right,
                           [&](const Tensor& v, const Tensor& x) { return pattern.product(v, x); });
      }
      if (context->needs_input_grad(3)) {
        found[3] =
            dense_gradient(pattern, right, grad, left, [&](const Tensor& v, const Tensor& x) {
              return pattern.transposed_product(v, x, right.sym_size(-2));
            });
      }
      return found;
    });
  }
};

// ---- the ops in torch's own, in its own precision: for transforms that have no kernel here ----

/// The tensors of a call, all with a batch, which is 1 where none has one.
class Batched {
 public:
  Batched(at::TensorList vectors, at::TensorList matrices) {
    const auto visit = [&](const Tensor& tensor, int64_t rank) {
      if (tensor.dim() <= rank) return;
      size_ = tensor.sym_size(0);
      any_ = true;
    };
    for (const Tensor& tensor : vectors) visit(tensor, 1);
    for (const Tensor& tensor : matrices) visit(tensor, 2);
  }

  bool any() const { return any_; }

  Tensor with_batch(const Tensor& tensor, int64_t rank) const {
    if (tensor.dim() > rank) return tensor;
    c10::SymDimVector shape{size_};
    for (const SymInt& size : tensor.sym_sizes()) shape.push_back(size);
    return tensor.unsqueeze(0).expand_symint(shape);
  }

  Tensor result(const Tensor& tensor) const { return any_ ? tensor : tensor.squeeze(0); }

 private:
  SymInt size_ = 1;
  bool any_ = false;
};

/// The row of each entry: how many of the rows after the first begin at it or before.
Tensor rows_of(const Tensor& crow, const Tensor& col) {
  const Tensor begins = crow.slice(1, 1, -1).to(at::kLong);
  c10::SymDimVector shape{col.sym_size(0), col.sym_size(1) + 1};
  const Tensor marks = at::zeros_symint(shape, crow.options().dtype(at::kLong))
                           .scatter_add(1, begins, at::ones_like(begins));
  return marks.cumsum(1).slice(1, 0, -1);
}

/// The rows of [batch, rows, width] at [batch, entries].
Tensor rows_at(const Tensor& matrix, const Tensor& at) {
  return matrix.gather(1, at.to(at::kLong).unsqueeze(-1).expand_symint(
                              {at.sym_size(0), at.sym_size(1), matrix.sym_size(2)}));
}

/// Adds values * from[read] into rows `write` of a result with so many rows.
Tensor scattered(const Tensor& values, const Tensor& from, const Tensor& read, const Tensor& write,
                 const SymInt& rows) {
  const at::ScalarType compute = compute_dtype(values.scalar_type());
  const Tensor terms = values.to(compute).unsqueeze(-1) * rows_at(from.to(compute), read);
  const c10::SymInt batch = terms.sym_size(0);
  const Tensor zeros = at::zeros_symint({batch, rows, terms.sym_size(2)}, terms.options());
  const Tensor places = write.to(at::kLong).unsqueeze(-1).expand_symint(terms.sym_sizes());
  return zeros.scatter_add(1, places, terms).to(values.scalar_type());
}

Tensor csr_decomposed(const Tensor& values, const Tensor& b, const Tensor& crow, const Tensor& col,
                      at::OptionalSymIntArrayRef shape, const MaybeTensor& transpose, bool check) {
  (void)spmm_output(values, b, crow, col, shape, transpose, check);
  if (check) {
    TORCH_CHECK(
        !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerBackMode),
        "torchkiln.", kSpmm,
        ": check: got True under a transform of torch.func, expected False; "
        "check the pattern before");
    check_pattern(crow, col, b.size(-2));
  }
  const Batched all({crow, col, values}, {b});
  const Tensor columns = all.with_batch(col, 1);
  const Tensor rows = rows_of(all.with_batch(crow, 1), columns);
  return all.result(scattered(all.with_batch(values, 1), all.with_batch(b, 2), columns, rows,
                              crow.sym_size(-1) - 1));
}

Tensor transposed_decomposed(const Tensor& crow, const Tensor& col, const Tensor& values,
                             const Tensor& x, const Tensor& transpose) {
  const Tensor out = spmm_transposed_output(crow, col, values, x, transpose);
  const Batched all({crow, col, values}, {x});
  const Tensor columns = all.with_batch(col, 1);
  const Tensor rows = rows_of(all.with_batch(crow, 1), columns);
  return all.result(
      scattered(all.with_batch(values, 1), all.with_batch(x, 2), rows, columns, out.sym_size(-2)));
}

Tensor sampled_decomposed(const Tensor& crow, const Tensor& col, const Tensor& left,
                          const Tensor& right, const MaybeTensor& transpose, bool summed) {
  (void)spmm_sampled_output(crow, col, left, right, transpose, summed);
  const Batched all({crow, col}, {left, right});
  const Tensor columns = all.with_batch(col, 1);
  const Tensor rows = rows_of(all.with_batch(crow, 1), columns);
  const at::ScalarType compute = compute_dtype(left.scalar_type());
  Tensor products = (rows_at(all.with_batch(left, 2).to(compute), rows) *
                     rows_at(all.with_batch(right, 2).to(compute), columns))
                        .sum(-1);
  if (summed) return products.sum(0).to(left.scalar_type());
  return all.result(products).to(left.scalar_type());
}

// ---- the entries of the dispatcher ----

Tensor csr_autograd(c10::DispatchKeySet keys, const Tensor& values, const Tensor& b,
                    const Tensor& crow, const Tensor& col, at::OptionalSymIntArrayRef shape,
                    const MaybeTensor& transpose, bool check) {
  if (is_transformed(crow, col, values, b))
    return csr_decomposed(values, b, crow, col, shape, transpose, check);
  if (needs_gradient(crow, col, values, b))
    return Product::apply(values, b, crow, col, shape, transpose, check);
  const at::AutoDispatchBelowADInplaceOrView below;
  return csr_op().redispatch(keys & c10::after_autograd_keyset, values, b, crow, col, shape,
                             transpose, check);
}

Tensor transposed_autograd(c10::DispatchKeySet keys, const Tensor& crow, const Tensor& col,
                           const Tensor& values, const Tensor& x, const Tensor& transpose) {
  if (is_transformed(values, x)) return transposed_decomposed(crow, col, values, x, transpose);
  if (needs_gradient(values, x)) return TransposedProduct::apply(crow, col, values, x, transpose);
  const at::AutoDispatchBelowADInplaceOrView below;
  return transposed_op().redispatch(keys & c10::after_autograd_keyset, crow, col, values, x,
                                    transpose);
}

Tensor sampled_autograd(c10::DispatchKeySet keys, const Tensor& crow, const Tensor& col,
                        const Tensor& left, const Tensor& right, const MaybeTensor& transpose,
                        bool summed) {
  if (is_transformed(left, right))
    return sampled_decomposed(crow, col, left, right, transpose, summed);
  if (needs_gradient(left, right))
    return SampledProduct::apply(crow, col, left, right, transpose, summed);
  const at::AutoDispatchBelowADInplaceOrView below;
  return sampled_op().redispatch(keys & c10::after_autograd_keyset, crow, col, left, right,
                                 transpose, summed);
}

/// Values and dense matrix go to the autocast dtype, as for torch.matmul.
Tensor autocast(const Tensor& values, const Tensor& b, const Tensor& crow, const Tensor& col,
                at::OptionalSymIntArrayRef shape, const MaybeTensor& transpose, bool check) {
  check_tensors(kSpmm, {{"crow", crow}, {"col", col}, {"values", values}, {"b", b}});
  // Of every device: the call must not come back here.
  const c10::impl::ExcludeDispatchKeyGuard outside(c10::autocast_dispatch_keyset);
  const at::DeviceType device = b.device().type();
  const at::ScalarType dtype = at::autocast::get_autocast_dtype(device);
  return csr_op().call(at::autocast::cached_cast(dtype, values, device),
                       at::autocast::cached_cast(dtype, b, device), crow, col, shape, transpose,
                       check);
}

}  // namespace

TORCH_LIBRARY_IMPL(torchkiln, Autograd, m) {
  m.impl("spmm_csr", TORCH_FN(csr_autograd));
  m.impl("spmm_transposed", TORCH_FN(transposed_autograd));
  m.impl("spmm_sampled", TORCH_FN(sampled_autograd));
}
TORCH_LIBRARY_IMPL(torchkiln, FuncTorchBatched, m) {
  m.impl("spmm_csr", TORCH_FN(csr_decomposed));
  m.impl("spmm_transposed", TORCH_FN(transposed_decomposed));
  m.impl("spmm_sampled", TORCH_FN(sampled_decomposed));
}
TORCH_LIBRARY_IMPL(torchkiln, AutocastCPU, m) { m.impl("spmm_csr", TORCH_FN(autocast)); }
TORCH_LIBRARY_IMPL(torchkiln, AutocastCUDA, m) { m.impl("spmm_csr", TORCH_FN(autocast)); }

}  // namespace torchkiln::spmm_autograd_ops

namespace torchkiln {

at::Tensor spmm(const at::Tensor& values, const at::Tensor& b, const at::Tensor& crow,
                const at::Tensor& col, const SpmmOptions& options) {
  return spmm_autograd_ops::csr_op().call(values, b, crow, col, options.shape, options.transpose,
                                          options.check);
}

at::Tensor csr_transpose(const at::Tensor& crow, const at::Tensor& col, c10::SymInt columns) {
  return spmm_autograd_ops::transpose_op().call(crow, col, std::move(columns));
}

}  // namespace torchkiln
