// The derivatives of the sparse products, which are again sparse products (see spmm.h), and the
// products with torch's own ops. kernel.cpp has the checks and the kernels.

#include "spmm/spmm.h"

#include "torchkiln/torch/checks.h"
#include "torchkiln/torch/ops.h"

namespace torchkiln::spmm_ops {
namespace {

using c10::SymInt;

/// The pattern of a call, and its transpose, which is built at the first use if it was not given.
struct Pattern {
  Tensor crow;
  Tensor col;
  Tensor transpose;

  const Tensor& transposed(const SymInt& columns) {
    if (!transpose.defined()) transpose = call<TransposeOp>(crow, col, columns);
    return transpose;
  }

  Tensor product(const Tensor& values, const Tensor& b) const {
    return call<CsrOp>(values, b, crow, col, std::nullopt, maybe(transpose), /*check=*/false);
  }
  Tensor transposed_product(const Tensor& values, const Tensor& x, const SymInt& columns) {
    return call<TransposedOp>(crow, col, values, x, transposed(columns));
  }
  /// The gradient of values with `rank` dimensions, summed over the batch if rank is 1.
  Tensor sampled(const Tensor& left, const Tensor& right, int64_t rank) const {
    return call<SampledOp>(crow, col, left, right, maybe(transpose), /*summed=*/rank == 1);
  }
};

/// Sums a gradient over the batch, or expands it, to the shape of its tensor.
Tensor fit(const Tensor& grad, c10::SymIntArrayRef shape) {
  const auto rank = static_cast<int64_t>(shape.size());
  if (grad.dim() > rank) return grad.sum(0);
  return grad.dim() < rank ? grad.expand_symint(shape) : grad;
}

/// multiply(values, x) as the gradient of `dense`. Products that will be summed over a batch are
/// computed in float32.
template <class Multiply>
Tensor dense_gradient(const Pattern& pattern, const Tensor& dense, const Tensor& values,
                      const Tensor& x, const Multiply& multiply) {
  const at::ScalarType dtype = dense.scalar_type();
  const bool has_batch = values.dim() == 2 || x.dim() == 3 || pattern.crow.dim() == 2;
  if (dense.dim() == 3 || !has_batch || !is_half(dtype))
    return fit(multiply(values, x), dense.sym_sizes());
  return fit(multiply(values.to(at::kFloat), x.to(at::kFloat)), dense.sym_sizes()).to(dtype);
}

/// Runs gradients(), recording them only under create_graph=True.
template <class Gradients>
variable_list with_recording(const Gradients& gradients) {
  if (at::GradMode::is_enabled()) return gradients();
  const at::AutoDispatchBelowADInplaceOrView below;
  return gradients();
}

// ---- the ops with torch's own ops ----

/// Gives all tensors of a call a batch dimension; its size is 1 if no tensor has one.
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

/// Returns the row of each entry: how many rows, not counting the first, begin at or before the
/// entry.
Tensor rows_of(const Tensor& crow, const Tensor& col) {
  const Tensor begins = crow.slice(1, 1, -1).to(at::kLong);
  c10::SymDimVector shape{col.sym_size(0), col.sym_size(1) + 1};
  const Tensor marks = at::zeros_symint(shape, crow.options().dtype(at::kLong))
                           .scatter_add(1, begins, at::ones_like(begins));
  return marks.cumsum(1).slice(1, 0, -1);
}

/// Gathers rows of matrix [batch, rows, width] at indices [batch, entries].
Tensor rows_at(const Tensor& matrix, const Tensor& at) {
  return matrix.gather(1, at.to(at::kLong).unsqueeze(-1).expand_symint(
                              {at.sym_size(0), at.sym_size(1), matrix.sym_size(2)}));
}

/// Adds values * from[read] into rows `write` of a result with `rows` rows.
Tensor scattered(const Tensor& values, const Tensor& from, const Tensor& read, const Tensor& write,
                 const SymInt& rows) {
  const at::ScalarType compute = compute_dtype(values.scalar_type());
  const Tensor terms = values.to(compute).unsqueeze(-1) * rows_at(from.to(compute), read);
  const c10::SymInt batch = terms.sym_size(0);
  const Tensor zeros = at::zeros_symint({batch, rows, terms.sym_size(2)}, terms.options());
  const Tensor places = write.to(at::kLong).unsqueeze(-1).expand_symint(terms.sym_sizes());
  return zeros.scatter_add(1, places, terms).to(values.scalar_type());
}

}  // namespace

Tensor CsrOp::composite(const CsrCall& call) {
  meta(call);
  const Tensor &values = call.values, &b = call.b, &crow = call.crow, &col = call.col;
  if (call.check) {
    TORCH_CHECK(
        !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerBackMode),
        "torchkiln.", kSpmm,
        ": check: got True under a transform of torch.func, expected False; "
        "check the pattern before the transform");
    check_pattern(crow, col, b.size(-2));
  }
  const Batched all({crow, col, values}, {b});
  const Tensor columns = all.with_batch(col, 1);
  const Tensor rows = rows_of(all.with_batch(crow, 1), columns);
  return all.result(scattered(all.with_batch(values, 1), all.with_batch(b, 2), columns, rows,
                              crow.sym_size(-1) - 1));
}

Tensor TransposedOp::composite(const Tensor& crow, const Tensor& col, const Tensor& values,
                               const Tensor& x, const Tensor& transpose) {
  const Tensor out = meta(crow, col, values, x, transpose);
  const Batched all({crow, col, values}, {x});
  const Tensor columns = all.with_batch(col, 1);
  const Tensor rows = rows_of(all.with_batch(crow, 1), columns);
  return all.result(
      scattered(all.with_batch(values, 1), all.with_batch(x, 2), rows, columns, out.sym_size(-2)));
}

Tensor SampledOp::composite(const Tensor& crow, const Tensor& col, const Tensor& left,
                            const Tensor& right, const MaybeTensor& transpose, bool summed) {
  meta(crow, col, left, right, transpose, summed);
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

// ---- recorded ----

Tensor CsrOp::recorded(const Below& below, const CsrCall& call) {
  return record(
      kSpmm, {*call.values, *call.b}, below.call<CsrOp>(call),
      keep(*call.crow, *call.col, *call.values, *call.b, tensor_or_undefined(call.transpose)),
      [](const Incoming& in, const Kept<5>& kept) {
        Pattern pattern{kept[0], kept[1], kept[4]};
        const Tensor &values = kept[2], &b = kept[3], &grad = in[0];
        return with_recording([&] {
          variable_list found(2);
          if (in.wants(0))
            found[0] = fit(pattern.sampled(grad, b, values.dim()), values.sym_sizes());
          if (in.wants(1)) {
            found[1] =
                dense_gradient(pattern, b, values, grad, [&](const Tensor& v, const Tensor& x) {
                  return pattern.transposed_product(v, x, b.sym_size(-2));
                });
          }
          return found;
        });
      });
}

Tensor TransposedOp::recorded(const Below& below, const Tensor& crow, const Tensor& col,
                              const Tensor& values, const Tensor& x, const Tensor& transpose) {
  return record("spmm_transposed", {values, x},
                below.call<TransposedOp>(crow, col, values, x, transpose),
                keep(crow, col, values, x, transpose), [](const Incoming& in, const Kept<5>& kept) {
                  const Pattern pattern{kept[0], kept[1], kept[4]};
                  const Tensor &values = kept[2], &x = kept[3], &grad = in[0];
                  return with_recording([&] {
                    variable_list found(2);
                    if (in.wants(0))
                      found[0] = fit(pattern.sampled(x, grad, values.dim()), values.sym_sizes());
                    if (in.wants(1)) {
                      found[1] = dense_gradient(
                          pattern, x, values, grad,
                          [&](const Tensor& v, const Tensor& g) { return pattern.product(v, g); });
                    }
                    return found;
                  });
                });
}

Tensor SampledOp::recorded(const Below& below, const Tensor& crow, const Tensor& col,
                           const Tensor& left, const Tensor& right, const MaybeTensor& transpose,
                           bool summed) {
  return record("spmm_sampled", {left, right},
                below.call<SampledOp>(crow, col, left, right, transpose, summed),
                keep(crow, col, left, right, tensor_or_undefined(transpose)),
                [](const Incoming& in, const Kept<5>& kept) {
                  Pattern pattern{kept[0], kept[1], kept[4]};
                  const Tensor &left = kept[2], &right = kept[3], &grad = in[0];
                  return with_recording([&] {
                    variable_list found(2);
                    if (in.wants(0)) {
                      found[0] = dense_gradient(
                          pattern, left, grad, right,
                          [&](const Tensor& v, const Tensor& x) { return pattern.product(v, x); });
                    }
                    if (in.wants(1)) {
                      found[1] = dense_gradient(
                          pattern, right, grad, left, [&](const Tensor& v, const Tensor& x) {
                            return pattern.transposed_product(v, x, right.sym_size(-2));
                          });
                    }
                    return found;
                  });
                });
}

/// Casts values and the dense matrix to the autocast dtype, as torch.matmul does.
Tensor CsrOp::autocast(const Autocast& cast, const CsrCall& call) {
  check_tensors(kSpmm,
                {{"crow", call.crow}, {"col", call.col}, {"values", call.values}, {"b", call.b}});
  const Tensor values = cast(*call.values), b = cast(*call.b);
  CsrCall given = call;
  given.values = values;
  given.b = b;
  return torchkiln::call<CsrOp>(given);
}

TORCH_LIBRARY_FRAGMENT(torchkiln, m) { define<TransposeOp, SampledOp, TransposedOp, CsrOp>(m); }

}  // namespace torchkiln::spmm_ops

namespace torchkiln {

at::Tensor spmm(const at::Tensor& values, const at::Tensor& b, const at::Tensor& crow,
                const at::Tensor& col, const SpmmOptions& options) {
  return call<spmm_ops::CsrOp>(values, b, crow, col, options);
}

at::Tensor csr_transpose(const at::Tensor& crow, const at::Tensor& col, c10::SymInt columns) {
  return call<spmm_ops::TransposeOp>(crow, col, std::move(columns));
}

}  // namespace torchkiln
