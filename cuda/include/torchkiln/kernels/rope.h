#pragma once

#include "torchkiln/core/dtype.h"

struct CUstream_st;

namespace torchkiln {

/// The heads of the queries or of the keys. Strides count elements; the elements of a head are
/// adjacent.
struct RopeHeads {
  const void* x;  // [batch, tokens, heads, head_dim] at any strides
  void* y;        // the same
  int64_t heads;  // 0: there is no such tensor
  int64_t x_stride[3];
  int64_t y_stride[3];
};

/// Factors of the pairs: row [batch, token] of a tensor, or row positions[batch, token] of a table.
struct RopeFactors {
  const void* data;
  int64_t batch_stride;  // 0 for a table
  int64_t row_stride;
};

/// Rotary embedding of two tensors: with c = cos[i] and s = sin[i], or -sin[i] if `inverse`,
///   y[a] = x[a] * c - x[b] * s
///   y[b] = x[b] * c + x[a] * s
/// for the pairs i < rotary / 2 of a head, which are (a, b) = (i, i + rotary / 2), or (2i, 2i + 1)
/// if `interleaved`. Elements from `rotary` on are copied.
struct Rope {
  RopeHeads tensors[2];
  RopeFactors cos;
  RopeFactors sin;
  int64_t factor_step;    // from pair to pair
  const void* positions;  // null: factors are found by batch and token
  bool are_64_bit;        // positions: int64, else int32
  int64_t position_stride[2];
  int64_t table_rows;  // a position outside of the table gives NaN
  Dtype dtype;
  Dtype factor_dtype;  // dtype, or float32 beside half precision
  bool interleaved;
  bool inverse;
  int64_t batch;
  int64_t tokens;  // batch * tokens is less than 2^31
  int64_t head_dim;
  int64_t rotary;  // even
};

namespace cpu {

/// Computes the tokens begin <= token < end of batch * tokens.
TORCHKILN_EXPORT Status rope(const Rope& arguments, int64_t begin, int64_t end);

}  // namespace cpu

namespace cuda {

/// Runs on the current device, queued on `stream`: one kernel for both tensors.
TORCHKILN_EXPORT Status rope(const Rope& arguments, CUstream_st* stream);

}  // namespace cuda
}  // namespace torchkiln
