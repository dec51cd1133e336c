// The derivatives of the sparse products, which are again sparse products (see spmm.h), and the
// products with torch's own ops. kernel.cpp has the checks and the kernels.

#include "spmm/spmm.h"

#include "torchkiln/torch/checks.h"
#include "torchkiln/torch/ops.h"

namespace torchkiln::spmm_ops {
namespace {

/// Sums or expands a gradient over the batch, so that it has the shape of its tensor.
Tensor fit(const Tensor& grad, c10::SymIntArrayRef shape) {
  const auto rank = static_cast<int64_t>(shape.size());
  if (grad.dim() > rank) return grad.sum(0);
  return grad.dim() < rank ? grad.expand_symint(shape) : grad;
}

/// The pattern of a call, and its transposed pattern, which is built at the first use if it was not
/// given and a kernel reads it.
struct Pattern {
  Tensor crow;
  Tensor col;
  Tensor transpose;

  /// The gradient of `values`: for each entry, the dot product of a row of left and a row of right.
  Tensor sampled(const Tensor& values, const Tensor& left, const Tensor& right) const {
    const bool summed = values.dim() == 1;  // whether to sum over the batch
    return fit(call<SampledOp>(crow, col, left, right, maybe(transpose), summed),
               values.sym_sizes());
  }
  /// The gradient of `dense`: the product of the sparse matrix with these values and x.
  Tensor product(const Tensor& dense, const Tensor& values, const Tensor& x) const {
    return dense_gradient(dense, values, x, [&](const Tensor& v, const Tensor& from) {
      return call<CsrOp>(v, from, crow, col, std::nullopt, maybe(transpose), /*check=*/false);
    });
  }
  /// The gradient of `dense`: the product of the transposed sparse matrix with these values and x.
  Tensor transposed(const Tensor& dense, const Tensor& values, const Tensor& x) {
    const SymInt columns = dense.sym_size(-2);
    if (!transpose.defined() && !reads_no_transpose(crow, col, values, x, columns))
      transpose = call<TransposeOp>(crow, col, columns);
    return dense_gradient(dense, values, x, [&](const Tensor& v, const Tensor& from) {
      return call<TransposedOp>(crow, col, v, from, maybe(transpose), columns);
    });
  }

 private:
  /// multiply(values, x). If the result will be summed over a batch, it is computed in float32.
  template <class Multiply>
  Tensor dense_gradient(const Tensor& dense, const Tensor& values, const Tensor& x,
                        const Multiply& multiply) const {
    const at::ScalarType dtype = dense.scalar_type();
    const bool has_batch = values.dim() == 2 || x.dim() == 3 || crow.dim() == 2;
    if (dense.dim() == 3 || !has_batch || !is_half(dtype))
      return fit(multiply(values, x), dense.sym_sizes());
    return fit(multiply(values.to(at::kFloat), x.to(at::kFloat)), dense.sym_sizes()).to(dtype);
  }
};

/// Records `out`, a product of a and b, in the autograd graph. `all` = {crow, col, a, b,
/// transpose}. The gradients are by_a(pattern, a, b, grad) and by_b(...); they are recorded in turn
/// only under create_graph=True.
template <class ByA, class ByB>
Tensor record_product(const char* op, const Kept<5>& all, const Tensor& out, const ByA& by_a,
                      const ByB& by_b) {
  return record(op, {all[2], all[3]}, out, all, [=](const Incoming& in, const Kept<5>& kept) {
    const auto& [crow, col, a, b, transpose] = kept;
    Pattern pattern{crow, col, transpose};
    std::optional<at::AutoDispatchBelowADInplaceOrView> below;
    if (!at::GradMode::is_enabled()) below.emplace();
    variable_list found(2);
    if (in.wants(0)) found[0] = by_a(pattern, a, b, in[0]);
    if (in.wants(1)) found[1] = by_b(pattern, a, b, in[0]);
    return found;
  });
}

// ---- the ops with torch's own ops ----

/// Gives all tensors of a call a batch dimension. Its size is 1 if no tensor has one.
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

/// Returns the row of each entry: the number of rows, except the first, that begin at or before the
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

Tensor CsrOp::composite(const Arguments& call) {
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

Tensor TransposedOp::composite(const Arguments& call) {
  meta(call);
  const Tensor &crow = call.crow, &col = call.col, &values = call.values, &x = call.x;
  const Batched all({crow, col, values}, {x});
  const Tensor columns = all.with_batch(col, 1);
  const Tensor rows = rows_of(all.with_batch(crow, 1), columns);
  return all.result(
      scattered(all.with_batch(values, 1), all.with_batch(x, 2), rows, columns, call.columns));
}

Tensor SampledOp::composite(const Arguments& call) {
  meta(call);
  const Tensor &crow = call.crow, &col = call.col, &left = call.left, &right = call.right;
  const Batched all({crow, col}, {left, right});
  const Tensor columns = all.with_batch(col, 1);
  const Tensor rows = rows_of(all.with_batch(crow, 1), columns);
  const at::ScalarType compute = compute_dtype(left.scalar_type());
  Tensor products = (rows_at(all.with_batch(left, 2).to(compute), rows) *
                     rows_at(all.with_batch(right, 2).to(compute), columns))
                        .sum(-1);
  if (call.summed) return products.sum(0).to(left.scalar_type());
  return all.result(products).to(left.scalar_type());
}

// ---- the ops, recorded for backward ----

Tensor CsrOp::recorded(const Below& below, const Arguments& call) {
  return record_product(
      kSpmm,
      keep(*call.crow, *call.col, *call.values, *call.b, tensor_or_undefined(call.transpose)),
      below.call<CsrOp>(call),
      [](auto& pattern, auto& values, auto& b, auto& grad) {
        return pattern.sampled(values, grad, b);
      },
      [](auto& pattern, auto& values, auto& b, auto& grad) {
        return pattern.transposed(b, values, grad);
      });
}

Tensor TransposedOp::recorded(const Below& below, const Arguments& call) {
  return record_product(
      "spmm_transposed",
      keep(*call.crow, *call.col, *call.values, *call.x, tensor_or_undefined(call.transpose)),
      below.call<TransposedOp>(call),
      [](auto& pattern, auto& values, auto& x, auto& grad) {
        return pattern.sampled(values, x, grad);
      },
      [](auto& pattern, auto& values, auto& x, auto& grad) {
        return pattern.product(x, values, grad);
      });
}

Tensor SampledOp::recorded(const Below& below, const Arguments& call) {
  return record_product(
      "spmm_sampled",
      keep(*call.crow, *call.col, *call.left, *call.right, tensor_or_undefined(call.transpose)),
      below.call<SampledOp>(call),
      [](auto& pattern, auto& left, auto& right, auto& grad) {
        return pattern.product(left, grad, right);
      },
      [](auto& pattern, auto& left, auto& right, auto& grad) {
        return pattern.transposed(right, grad, left);
      });
}

/// Casts values and the dense matrix to the autocast dtype, as torch.matmul does.
Tensor CsrOp::autocast(const Autocast& cast, const Arguments& call) {
  check_tensors(kSpmm,
                {{"crow", call.crow}, {"col", call.col}, {"values", call.values}, {"b", call.b}});
  const Tensor values = cast(*call.values), b = cast(*call.b);
  Arguments given = call;
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
