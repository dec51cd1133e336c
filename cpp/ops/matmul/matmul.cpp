// matmul, computed by torch's products, which are as fast as our kernels without an epilogue. On a
// CPU with AMX, some factors are padded first (detail/whole_tiles.h). A gradient that is summed
// over a batch is computed as one product with a longer inner sum. linear.cpp has the layer with an
// activation.

#include <ATen/ExpandUtils.h>

#include "detail/whole_tiles.h"
#include "matmul/kernel.h"
#include "torchkiln/torch/checks.h"
#include "torchkiln/torch/empty.h"
#include "torchkiln/torch/op.h"
#include "torchkiln/torch/ops.h"

namespace torchkiln::matmul_ops {
namespace {

using at::Tensor;
using c10::SymInt;
using c10::SymIntArrayRef;

constexpr const char* kName = "matmul";

/// An argument as a matrix: a vector on the left becomes a row, a vector on the right a column.
Tensor as_rows(const Tensor& a) { return a.dim() == 1 ? a.unsqueeze(0) : a; }
Tensor as_columns(const Tensor& b) { return b.dim() == 1 ? b.unsqueeze(1) : b; }

/// The batch sizes: all but the last two.
SymIntArrayRef batch_of(const Tensor& matrices) {
  return matrices.sym_sizes().slice(0, matrices.dim() - 2);
}

void check_batches(const Tensor& a, const Tensor& b) {
  const SymIntArrayRef left = batch_of(a);
  const SymIntArrayRef right = batch_of(b);
  for (size_t d = 1; d <= std::min(left.size(), right.size()); ++d) {
    const SymInt& of_a = left[left.size() - d];
    const SymInt& of_b = right[right.size() - d];
    TORCH_CHECK(of_a == of_b || of_a == 1 || of_b == 1, "torchkiln.", kName, ": b: got shape ",
                b.sym_sizes(), ", expected leading sizes that broadcast with a of shape ",
                a.sym_sizes());
  }
}

/// Checks the arguments. Returns the sizes of the output as matrices, even for vector arguments.
c10::SymDimVector checked_sizes(const Tensor& a, const Tensor& b) {
  check_tensors(kName, {{"a", a}, {"b", b}});
  check_dtype(kName, "a", a);
  check_same_dtype(kName, "b", b, "a", a);
  for (const auto& [name, tensor] : {Operand{"a", a}, Operand{"b", b}}) {
    TORCH_CHECK(tensor.dim() >= 1, "torchkiln.", kName, ": ", name,
                ": got a 0-dimensional tensor, expected at least 1 dimension; multiply with *");
  }
  const Tensor rows = as_rows(a);
  const Tensor columns = as_columns(b);
  TORCH_CHECK(columns.sym_size(-2) == rows.sym_size(-1), "torchkiln.", kName, ": b: got shape ",
              b.sym_sizes(), ", expected ", rows.sym_size(-1), " in dimension ",
              b.dim() == 1 ? -1 : -2, ", the last size of a");
  check_batches(rows, columns);
  c10::SymDimVector sizes = at::infer_size_symdimvector(batch_of(rows), batch_of(columns));
  sizes.push_back(rows.sym_size(-2));
  sizes.push_back(columns.sym_size(-1));
  return sizes;
}

/// Removes the dimensions that were added to vector arguments.
Tensor without_added(const Tensor& out, const Tensor& a, const Tensor& b) {
  c10::SymDimVector sizes(batch_of(out));
  if (a.dim() > 1) sizes.push_back(out.sym_size(-2));
  if (b.dim() > 1) sizes.push_back(out.sym_size(-1));
  return out.view_symint(sizes);
}

/// A tensor as [batch, rows, columns]. If the batch shares one matrix, its batch size is 1.
Tensor as_batch(const Tensor& matrices, at::IntArrayRef batch) {
  const int64_t rows = matrices.size(-2);
  const int64_t columns = matrices.size(-1);
  const auto own = matrices.sizes().slice(0, matrices.dim() - 2);
  if (c10::multiply_integers(own) == 1)
    return matrices.reshape({1, rows, columns}).expand({c10::multiply_integers(batch), -1, -1});
  std::vector<int64_t> sizes(batch.begin(), batch.end());
  sizes.insert(sizes.end(), {rows, columns});
  return matrices.expand(sizes).reshape({c10::multiply_integers(batch), rows, columns});
}

/// The matrices, expanded to the broadcast batch, as one matrix with the rows of all of them.
Tensor flat_rows(const Tensor& matrices, SymIntArrayRef batch) {
  c10::SymDimVector sizes(batch);
  sizes.push_back(matrices.sym_size(-2));
  sizes.push_back(matrices.sym_size(-1));
  return as_matrix(matrices.expand_symint(sizes));
}

// Gradients of a matrix product for arguments of the given sizes. If the batch shared one matrix,
// the sum over the batch becomes part of the product's inner sum, which is rounded once.
//
// A float32 matrix with contiguous columns gets a gradient with contiguous columns, as in torch:
// that product is as fast as the product of forward. In half precision, rows are faster unless
// there are few columns.

bool has_gradient_in_columns(const Tensor& matrix) {
  constexpr int64_t kFewColumns = 8;
  return matrix.dim() == 2 && matrix.sym_stride(0) == 1 &&
         matrix.sym_stride(1) == matrix.sym_size(0) &&
         (!is_half(matrix.scalar_type()) || matrix.sym_size(1) <= kFewColumns);
}

Tensor gradient_of_a(const Tensor& grad, const Tensor& b, SymIntArrayRef sizes, bool by_columns) {
  const Tensor columns = as_columns(b);
  if (grad.dim() == 2 && sizes.size() == 2) {
    return by_columns ? torchkiln::matmul(columns, grad.t()).t()
                      : torchkiln::matmul(grad, columns.t());
  }
  if (sizes.size() > 2) return at::sum_to(torchkiln::matmul(grad, columns.mT()), sizes);
  const SymIntArrayRef batch = batch_of(grad);
  return torchkiln::matmul(flat_rows(grad.mT(), batch).t(), flat_rows(columns.mT(), batch))
      .reshape_symint(sizes);
}
Tensor gradient_of_b(const Tensor& grad, const Tensor& a, SymIntArrayRef sizes, bool by_columns) {
  const Tensor rows = as_rows(a);
  if (grad.dim() == 2 && sizes.size() == 2) {
    return by_columns ? torchkiln::matmul(grad.t(), rows).t() : torchkiln::matmul(rows.t(), grad);
  }
  if (sizes.size() > 2) return at::sum_to(torchkiln::matmul(rows.mT(), grad), sizes);
  const SymIntArrayRef batch = batch_of(grad);
  return torchkiln::matmul(flat_rows(rows, batch).t(), flat_rows(grad, batch))
      .reshape_symint(sizes);
}

struct Op {
  static constexpr bool kFlexibleLayout = true;
  static constexpr const char* kSchema = "torchkiln::matmul(Tensor a, Tensor b) -> Tensor";

  static Tensor meta(const Tensor& a, const Tensor& b) {
    return without_added(empty_of(checked_sizes(a, b), a), a, b);
  }

  /// Computes torch's product, which is as fast as our kernels: these are faster only with a fused
  /// epilogue, in linear().
  static Tensor kernel(const Tensor& a, const Tensor& b) {
    const c10::SymDimVector sizes = checked_sizes(a, b);
    if (a.dim() == 2 && b.dim() == 2) {
      const auto [left, right] = in_whole_tiles(a, b);
      return at::mm(left, right);
    }
    const Tensor out = empty_of(sizes, a);
    if (out.numel() > 0) {
      const Tensor rows = as_rows(a);
      const Tensor columns = as_columns(b);
      if (columns.dim() == 2) {
        Tensor flat = out.flatten(0, -2);  // one product with the rows of all matrices
        const auto [left, right] = in_whole_tiles(rows.flatten(0, -2), columns);
        at::mm_out(flat, left, right);
      } else {
        const auto batch = out.sizes().slice(0, out.dim() - 2);
        Tensor flat = out.flatten(0, -3);
        const auto [left, right] = in_whole_tiles(as_batch(rows, batch), as_batch(columns, batch));
        at::bmm_out(flat, left, right);
      }
    }
    return without_added(out, a, b);
  }

  static Tensor composite(const Tensor& a, const Tensor& b) {
    checked_sizes(a, b);
    return at::matmul(a, b);
  }

  /// The gradients are matmul() calls, which are recorded under create_graph=True.
  static Tensor recorded(const Below& below, const Tensor& a, const Tensor& b) {
    const c10::SymDimVector of_a(a.sym_sizes()), of_b(b.sym_sizes());
    // The gradient of a needs only b, and the gradient of b only a.
    return record(
        kName, {a, b}, below.call<Op>(a, b),
        keep(b.requires_grad() ? a : Tensor(), a.requires_grad() ? b : Tensor()),
        [of_a, of_b, a_by_columns = has_gradient_in_columns(a),
         b_by_columns = has_gradient_in_columns(b)](const Incoming& in, const Kept<2>& kept) {
          Tensor grad = in[0];
          if (of_b.size() == 1) grad = grad.unsqueeze(-1);
          if (of_a.size() == 1) grad = grad.unsqueeze(-2);
          return variable_list{
              in.wants(0) ? gradient_of_a(grad, kept[1], of_a, a_by_columns) : Tensor(),
              in.wants(1) ? gradient_of_b(grad, kept[0], of_b, b_by_columns) : Tensor()};
        });
  }

  static Tensor autocast(const Autocast& cast, const Tensor& a, const Tensor& b) {
    check_tensors(kName, {{"a", a}, {"b", b}});
    return call<Op>(cast(a), cast(b));
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) { define<Op>(m); }

}  // namespace torchkiln::matmul_ops

namespace torchkiln {

at::Tensor matmul(const at::Tensor& a, const at::Tensor& b) { return call<matmul_ops::Op>(a, b); }

}  // namespace torchkiln
