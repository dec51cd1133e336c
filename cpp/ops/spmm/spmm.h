#pragma once

// The ops of sparse products, for a batch of CSR matrices. A tensor that the whole batch shares has
// no batch dimension:
//
//   crow [batch, rows + 1], col [batch, entries], values [batch, entries]
//
// The derivatives of the three products are again these products; G is the incoming gradient:
//
//   spmm_csr         A B       by values: sampled(G, B)    by B:     transposed(G)
//   spmm_transposed  A^T X     by values: sampled(X, G)    by X:     csr(G)
//   spmm_sampled     X_i . Y_j at the entries (i, j): by X: csr(G, Y), by Y: transposed(G, X)
//
// kernel.cpp has meta() and kernel(), spmm.cpp has the composites and derivatives.

#include "torchkiln/torch/op.h"

namespace torchkiln::spmm_ops {

using at::Tensor;
using c10::SymInt;

inline constexpr const char* kSpmm = "spmm";

struct CsrOp {
  struct Arguments {
    Borrowed<Tensor> values, b, crow, col;
    at::OptionalSymIntArrayRef shape;  // [rows, columns]
    Borrowed<MaybeTensor> transpose;   // the packed transposed pattern
    bool check;

    TORCHKILN_FIELDS(self.values, self.b, self.crow, self.col, self.shape, self.transpose,
                     self.check);
  };
  static constexpr const char* kSchema =
      "torchkiln::spmm_csr(Tensor values, Tensor b, Tensor crow, Tensor col, *, "
      "SymInt[]? shape=None, Tensor? transpose=None, bool check=False) -> Tensor";
  static Tensor meta(const Arguments& call);
  static Tensor kernel(const Arguments& call);
  static Tensor composite(const Arguments& call);
  static Tensor recorded(const Below& below, const Arguments& call);
  static Tensor autocast(const Autocast& cast, const Arguments& call);
};

struct TransposedOp {
  struct Arguments {
    Borrowed<Tensor> crow, col, values, x;
    Borrowed<MaybeTensor> transpose;  // kernel() builds it if it needs one
    SymInt columns;

    TORCHKILN_FIELDS(self.crow, self.col, self.values, self.x, self.transpose, self.columns);
  };
  static constexpr const char* kSchema =
      "torchkiln::_spmm_transposed(Tensor crow, Tensor col, Tensor values, Tensor x, "
      "Tensor? transpose, SymInt columns) -> Tensor";
  static Tensor meta(const Arguments& call);
  static Tensor kernel(const Arguments& call);
  static Tensor composite(const Arguments& call);
  static Tensor recorded(const Below& below, const Arguments& call);
};

struct SampledOp {
  struct Arguments {
    Borrowed<Tensor> crow, col, left, right;
    Borrowed<MaybeTensor> transpose;
    bool summed;  // whether to sum over the batch

    TORCHKILN_FIELDS(self.crow, self.col, self.left, self.right, self.transpose, self.summed);
  };
  static constexpr const char* kSchema =
      "torchkiln::_spmm_sampled(Tensor crow, Tensor col, Tensor left, Tensor right, "
      "Tensor? transpose, bool summed) -> Tensor";
  static Tensor meta(const Arguments& call);
  static Tensor kernel(const Arguments& call);
  static Tensor composite(const Arguments& call);
  static Tensor recorded(const Below& below, const Arguments& call);
};

/// Builds the transposed pattern, packed into one tensor.
struct TransposeOp {
  static constexpr const char* kSchema =
      "torchkiln::csr_transpose(Tensor crow, Tensor col, SymInt columns) -> Tensor";
  static Tensor meta(const Tensor& crow, const Tensor& col, SymInt columns);
  static Tensor kernel(const Tensor& crow, const Tensor& col, SymInt columns);
};

/// Whether the kernel of TransposedOp reads no transposed pattern, because the matrix has few
/// columns. False for symbolic sizes.
bool reads_no_transpose(const Tensor& crow, const Tensor& col, const Tensor& values,
                        const Tensor& x, const SymInt& columns);

/// Raises an error for a pattern with an index out of range or a duplicate entry. Synchronises with
/// the GPU.
void check_pattern(const Tensor& crow, const Tensor& col, int64_t columns);

}  // namespace torchkiln::spmm_ops
