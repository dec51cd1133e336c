#pragma once

// What the files of sparse products share. All take a batch of matrices in compressed rows, of
// which each tensor may be the same for the whole batch and then has no first dimension:
//
//   crow [batch, rows + 1], col [batch, entries], values [batch, entries]
//
// The op and its two helpers are each other's derivatives: with G the incoming gradient
//
//   spmm_csr         A B       by values: sampled(G, B)    by B:     transposed(G)
//   spmm_transposed  A^T X     by values: sampled(X, G)    by X:     csr(G)
//   spmm_sampled     X_i . Y_j at the entries (i, j): by X: csr(G, Y), by Y: transposed(G, X)

#include <ATen/ATen.h>

#include <optional>

namespace torchkiln {

using MaybeTensor = std::optional<at::Tensor>;

inline constexpr const char* kSpmm = "spmm";

using SpmmSchema = at::Tensor(const at::Tensor& values, const at::Tensor& b, const at::Tensor& crow,
                              const at::Tensor& col, at::OptionalSymIntArrayRef shape,
                              const MaybeTensor& transpose, bool check);
using SpmmTransposedSchema = at::Tensor(const at::Tensor& crow, const at::Tensor& col,
                                        const at::Tensor& values, const at::Tensor& x,
                                        const at::Tensor& transpose);
using SpmmSampledSchema = at::Tensor(const at::Tensor& crow, const at::Tensor& col,
                                     const at::Tensor& left, const at::Tensor& right,
                                     const MaybeTensor& transpose, bool summed);
using SpmmTransposeSchema = at::Tensor(const at::Tensor& crow, const at::Tensor& col,
                                       c10::SymInt columns);

/// The checked, empty results; on Meta and symbolic tensors, too.
at::Tensor spmm_output(const at::Tensor& values, const at::Tensor& b, const at::Tensor& crow,
                       const at::Tensor& col, at::OptionalSymIntArrayRef shape,
                       const MaybeTensor& transpose, bool check);
at::Tensor spmm_transposed_output(const at::Tensor& crow, const at::Tensor& col,
                                  const at::Tensor& values, const at::Tensor& x,
                                  const at::Tensor& transpose);
at::Tensor spmm_sampled_output(const at::Tensor& crow, const at::Tensor& col,
                               const at::Tensor& left, const at::Tensor& right,
                               const MaybeTensor& transpose, bool summed);

/// Refuses patterns that are no sound ones, or have an entry twice; waits for the GPU.
void check_pattern(const at::Tensor& crow, const at::Tensor& col, int64_t columns);

}  // namespace torchkiln
