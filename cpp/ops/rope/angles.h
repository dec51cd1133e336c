#pragma once

// cos, sin and the options of a rotation: their checks, the arguments of the kernels, and the
// rotation with torch's own ops.

#include <array>
#include <limits>
#include <string>

#include "detail/maybe_copy.h"
#include "torchkiln/kernels/rope.h"
#include "torchkiln/torch/checks.h"
#include "torchkiln/torch/elementwise.h"
#include "torchkiln/torch/op.h"

namespace torchkiln::rope_ops {

using at::Tensor;
using c10::SymInt;

/// The rotation of a call.
struct Angles {
  Borrowed<Tensor> cos;
  Borrowed<Tensor> sin;
  bool interleaved;
  Borrowed<MaybeTensor> positions;
  std::optional<int64_t> rotary_dim;
  bool inverse;
};

/// The heads to rotate, and their names in errors.
struct Heads {
  const char* op;
  const char* name;  // the tensor's name, in errors
  const Tensor& tensor;
  std::optional<SymInt> batch;
  SymInt tokens;
  SymInt head_dim;

  /// The number of elements of a head that are rotated.
  SymInt rotary(const Angles& angles) const {
    return angles.rotary_dim ? SymInt(*angles.rotary_dim) : head_dim;
  }
  /// Whether cos and sin contain each factor twice.
  bool factors_are_doubled(const Angles& angles) const {
    return rotary(angles) != 0 && angles.cos->sym_size(-1) == rotary(angles);
  }
};

inline void check_rotary(const Heads& heads, const Angles& angles) {
  const SymInt& size = heads.head_dim;
  if (!angles.rotary_dim) {
    TORCH_CHECK(size % 2 == 0, "torchkiln.", heads.op, ": ", heads.name, ": got heads of ", size,
                " elements, expected an even number; rotary_dim= rotates a part of each head");
    return;
  }
  TORCH_CHECK_VALUE(
      *angles.rotary_dim >= 2 && *angles.rotary_dim % 2 == 0 && size >= *angles.rotary_dim,
      "torchkiln.", heads.op, ": rotary_dim: got ", *angles.rotary_dim,
      ", expected an even number from 2 to ", size, ", the elements of a head");
}

/// Whether a tensor is [tokens, ...] or [batch or 1, tokens, ...], with `more` further dimensions.
inline bool has_tokens(const Heads& heads, const Tensor& tensor, int64_t more) {
  const int64_t leading = tensor.dim() - more;
  if (leading == 2 && heads.batch) {
    return (tensor.sym_size(0) == 1 || tensor.sym_size(0) == *heads.batch) &&
           tensor.sym_size(1) == heads.tokens;
  }
  return leading == 1 && tensor.sym_size(0) == heads.tokens;
}

inline void check_factors(const Heads& heads, const Angles& angles) {
  const Tensor& cos = angles.cos;
  check_parameter_dtype(heads.op, "cos", cos.scalar_type(), heads.name, heads.tensor.scalar_type());
  const bool has_table = angles.positions.has_value();
  const SymInt pairs = heads.rotary(angles) / 2;
  const bool fits = has_table ? cos.dim() == 2 : cos.dim() >= 2 && has_tokens(heads, cos, 1);
  const std::string rows = has_table ? "rows" : c10::str(heads.tokens);
  const std::string batches = has_table || !heads.batch ? ""
                                                        : c10::str(" or [", *heads.batch, ", ",
                                                                   heads.tokens, ", ", pairs, "]");
  TORCH_CHECK(fits && (cos.sym_size(-1) == pairs || cos.sym_size(-1) == heads.rotary(angles)),
              "torchkiln.", heads.op, ": cos: got shape ", cos.sym_sizes(), ", expected [", rows,
              ", ", pairs, "]", batches, ", a factor for each pair of ",
              has_table ? "each position" : "each token", ", or each factor twice");
  check_same_dtype(heads.op, "sin", angles.sin, "cos", cos);
  check_same_shape(heads.op, "sin", angles.sin, "cos", cos);
}

inline void check_positions_dtype(const char* op, const Tensor& positions) {
  const at::ScalarType dtype = positions.scalar_type();
  TORCH_CHECK(dtype == at::kLong || dtype == at::kInt, "torchkiln.", op, ": positions: got dtype ",
              dtype_name(dtype), ", expected int64 or int32");
}

/// Checks positions, if there are any. `what`: the meaning of a position, for errors.
inline void check_positions(const Heads& heads, const MaybeTensor& positions, const char* what) {
  if (!positions) return;
  check_positions_dtype(heads.op, *positions);
  TORCH_CHECK(has_tokens(heads, *positions, 0), "torchkiln.", heads.op, ": positions: got shape ",
              positions->sym_sizes(), ", expected [", heads.tokens, "]",
              heads.batch ? c10::str(" or [", *heads.batch, ", ", heads.tokens, "]") : "", ", ",
              what, " for each token");
}

/// Checks everything except layouts and devices, which must be checked before.
inline void check_angles(const Heads& heads, const Angles& angles) {
  check_rotary(heads, angles);
  check_factors(heads, angles);
  check_positions(heads, angles.positions, "a row of cos and sin");
}

/// The number of tokens of all batches, which the kernels count in 31 bits.
inline int64_t count_tokens(const Heads& heads) {
  const int64_t tokens = (heads.batch.value_or(1) * heads.tokens).expect_int();
  TORCH_CHECK(tokens < int64_t{1} << 31, "torchkiln.", heads.op, ": ", heads.name, ": got ", tokens,
              " tokens, expected fewer than 2^31; split the batch");
  return tokens;
}

/// The tensor, or a copy in which the elements of the last dimension are adjacent.
inline MaybeCopy with_adjacent_elements(const char* name, const Tensor& tensor) {
  if (tensor.size(-1) <= 1 || tensor.stride(-1) == 1) return MaybeCopy::borrowed(tensor);
  trace::note("copied: the elements of ", name, " are not adjacent, strides ", tensor.strides());
  return MaybeCopy::owned(tensor.contiguous());
}

inline RopeFactors factors_of(const Tensor& factors) {
  const bool has_batch = factors.dim() == 3 && factors.size(0) != 1;
  return {factors.const_data_ptr(), has_batch ? factors.stride(0) : 0, factors.stride(-2)};
}

/// The row of each token in a tensor of `rows` rows.
inline TokenRows rows_of(const MaybeTensor& positions, int64_t rows) {
  TokenRows found{};
  found.rows = rows;
  if (!positions) return found;
  found.positions = positions->const_data_ptr();
  found.are_64_bit = positions->scalar_type() == at::kLong;
  found.stride[0] = positions->dim() == 2 && positions->size(0) != 1 ? positions->stride(0) : 0;
  found.stride[1] = positions->stride(-1);
  return found;
}

/// The arguments of the kernels; `cos` and `sin` have adjacent elements.
inline RopeAngles arguments_of(const Heads& heads, const Angles& angles, const Tensor& cos,
                               const Tensor& sin) {
  RopeAngles arguments{};
  arguments.cos = factors_of(cos);
  arguments.sin = factors_of(sin);
  arguments.factor_step = heads.factors_are_doubled(angles) && angles.interleaved ? 2 : 1;
  arguments.rows = rows_of(angles.positions, cos.size(-2));
  arguments.factor_dtype = dtype_of(cos);
  arguments.interleaved = angles.interleaved;
  arguments.inverse = angles.inverse;
  arguments.rotary = heads.rotary(angles).expect_int();
  return arguments;
}

/// The factors of each pair in the compute dtype: [..., tokens, 1, pairs] if `heads_at` is -2,
/// [..., 1, tokens, pairs] if it is -3.
inline Tensor composite_factors(const Heads& heads, const Angles& angles, const Tensor& given,
                                int64_t heads_at) {
  const SymInt pairs = heads.rotary(angles) / 2;
  Tensor factors = given.to(compute_dtype(heads.tensor.scalar_type()));
  if (heads.factors_are_doubled(angles)) {
    factors = angles.interleaved ? factors.slice(-1, 0, std::nullopt, 2)
                                 : factors.narrow_symint(-1, 0, pairs);
  }
  if (angles.positions) {
    const SymInt rows = factors.sym_size(0);
    const Tensor positions = angles.positions->to(at::kLong);
    c10::SymDimVector shape(positions.sym_sizes());
    shape.push_back(pairs);
    const Tensor known = positions.ge(0).logical_and(positions.lt(rows)).unsqueeze(-1);
    const Tensor nearest = positions.where(known.squeeze(-1), at::zeros_like(positions));
    factors = factors.index_select(0, nearest.reshape({-1}))
                  .reshape_symint(shape)
                  .masked_fill(known.logical_not(), std::numeric_limits<double>::quiet_NaN());
  }
  return factors.unsqueeze(heads_at);
}

/// composite_factors() of cos and sin. Queries and keys share them, so that the gradients of both
/// are added before they are rounded.
inline std::array<Tensor, 2> composite_angles(const Heads& heads, const Angles& angles,
                                              int64_t heads_at) {
  const Tensor sin = composite_factors(heads, angles, angles.sin, heads_at);
  return {composite_factors(heads, angles, angles.cos, heads_at), angles.inverse ? sin.neg() : sin};
}

/// The rotation of `x` [..., head_dim] in the dtype of the factors.
inline Tensor composite_rotation(const Tensor& x, const Heads& heads, const Angles& angles,
                                 const std::array<Tensor, 2>& factors) {
  const auto& [cos, sin] = factors;
  const SymInt rotary = heads.rotary(angles), pairs = rotary / 2;
  const Tensor wide = x.to(cos.scalar_type());
  const Tensor turned = wide.narrow_symint(-1, 0, rotary);
  Tensor a, b;
  if (angles.interleaved) {
    a = turned.slice(-1, 0, std::nullopt, 2);
    b = turned.slice(-1, 1, std::nullopt, 2);
  } else {
    a = turned.narrow_symint(-1, 0, pairs);
    b = turned.narrow_symint(-1, pairs, pairs);
  }
  const Tensor first = a * cos - b * sin, second = b * cos + a * sin;
  const Tensor rotated = angles.interleaved ? at::stack({first, second}, -1).flatten(-2)
                                            : at::cat({first, second}, -1);
  if (!angles.rotary_dim) return rotated;
  return at::cat({rotated, wide.narrow_symint(-1, rotary, heads.head_dim - rotary)}, -1);
}

}  // namespace torchkiln::rope_ops
