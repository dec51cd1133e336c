#pragma once

#include <cstddef>

#include "torchkiln/core/dtype.h"
#include "torchkiln/core/workspace.h"

struct CUstream_st;

namespace torchkiln {

/// Cosines or sines of the pairs: a row per [batch, token], or the rows of a table.
struct RopeFactors {
  const void* data;
  int64_t batch_stride;  // 0 for a table
  int64_t row_stride;
};

/// The row of each token in a tensor of `rows` rows: positions[batch, token], or the token's own
/// index.
struct TokenRows {
  const void* positions;  // null: row i for token i of a batch
  bool are_64_bit;        // int64, else int32
  int64_t stride[2];      // from batch to batch, from token to token
  int64_t rows;           // a token whose position is outside of [0, rows) has no row
};

/// The rotation of a head: with c = cos[i] and s = sin[i], or -sin[i] if `inverse`,
///   y[a] = x[a] * c - x[b] * s
///   y[b] = x[b] * c + x[a] * s
/// for the pairs i < rotary / 2, which are (a, b) = (i, i + rotary / 2), or (2i, 2i + 1) if
/// `interleaved`. Elements from `rotary` on are copied.
struct RopeAngles {
  RopeFactors cos;
  RopeFactors sin;
  int64_t factor_step;  // elements from pair to pair
  TokenRows rows;       // in cos and sin; a token without a row becomes NaN
  Dtype factor_dtype;   // the dtype of the heads, or float32 for half precision
  bool interleaved;
  bool inverse;
  int64_t rotary;  // elements of a head that are rotated; even
};

/// The heads of the queries or of the keys. Strides count elements; the elements of a head are
/// adjacent.
struct RopeHeads {
  const void* x;  // [batch, tokens, heads, head_dim] at any strides
  void* y;        // as x
  int64_t heads;  // 0: there is no such tensor
  int64_t x_stride[3];
  int64_t y_stride[3];
};

/// The rotation of two tensors.
struct Rope {
  RopeHeads tensors[2];
  RopeAngles angles;
  Dtype dtype;
  int64_t batch;
  int64_t tokens;  // batch * tokens is less than 2^31
  int64_t head_dim;
};

/// The largest head_dim of a QkvNormRope.
inline constexpr int64_t kMostHeadElements = 1024;

/// The elements of a token that are normalized together: none; those of each head; or all heads of
/// the queries, and all heads of the keys.
enum class QkvNorm { none, head, all };

/// Queries, keys and values of a packed projection. Each head of the queries and keys is normalized
/// and rotated:
///   y = rotation of x * rstd * (weight + weight_offset), with rstd = 1 / sqrt(mean of x^2 + eps)
/// or of x if there is no norm. The mean is taken over a head, or over all heads of the queries or
/// of the keys. Values are copied.
struct QkvNormRope {
  const void* qkv;        // [batch, tokens, heads + 2 * kv_heads, head_dim], heads adjacent
  int64_t qkv_stride[2];  // from batch to batch, from token to token
  const void* weight[2];  // of queries and keys: [norm_size(kind)], contiguous; null for ones
  void* out[3];           // q, k, v: [batch, tokens, (kv_)heads, head_dim], head elements adjacent
  int64_t out_stride[3][3];  // from batch to batch, token to token and head to head
  TokenRows places;  // rows of k and v in out; k and v of a token without a row are not written
  RopeAngles angles;
  Dtype dtype;
  Dtype weight_dtype;  // dtype, or float32 for half precision
  QkvNorm norm;
  double eps;
  double weight_offset;  // added to weights that are not null
  int64_t batch;
  int64_t tokens;  // batch * tokens is less than 2^31
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;  // at most kMostHeadElements

  /// Elements that are normalized together, in the queries (kind 0) or the keys (kind 1).
  int64_t norm_size(int kind) const {
    return norm != QkvNorm::all ? head_dim : (kind == 0 ? heads : kv_heads) * head_dim;
  }
};

/// An additive attention mask that hides the keys after each token:
///   out[batch, token, key] = 0 for key <= place of the token, else -infinity
struct CacheMask {
  void* out;  // [batch, tokens, length], contiguous
  Dtype dtype;
  TokenRows places;
  int64_t batch;
  int64_t tokens;
  int64_t length;  // keys
};

/// The gradients of QkvNormRope. `forward.out` is not used.
struct QkvNormRopeBackward {
  QkvNormRope forward;
  const void* grad[3];        // of q, k, v; null for zeros
  int64_t grad_stride[3][3];  // from batch to batch, token to token and head to head
  void* grad_qkv;             // [batch, tokens, heads + 2 * kv_heads, head_dim], contiguous
  void* grad_weight[2];       // [norm_size(kind)] of weight_dtype; null if not wanted
  void* workspace;  // has the size that cpu::split() returns; CUDA launchers allocate theirs
};

namespace cpu {

/// Computes the tokens begin <= token < end of batch * tokens.
TORCHKILN_EXPORT Status rope(const Rope& arguments, int64_t begin, int64_t end);
TORCHKILN_EXPORT Status qkv_norm_rope(const QkvNormRope& arguments, int64_t begin, int64_t end);
TORCHKILN_EXPORT Status cache_mask(const CacheMask& arguments, int64_t begin, int64_t end);

/// The split of a backward: tasks are chunks of tokens; results are the elements of the gradients
/// of both weights.
TORCHKILN_EXPORT Split split(const QkvNormRopeBackward& arguments);

/// Computes grad_qkv for the chunks begin <= chunk < end, and writes the chunks' partial sums of
/// grad_weight to the workspace.
TORCHKILN_EXPORT Status qkv_norm_rope_backward(const QkvNormRopeBackward& arguments, int64_t begin,
                                               int64_t end);

/// Adds the sums of all chunks for the elements begin <= i < end of both gradients.
TORCHKILN_EXPORT Status qkv_norm_rope_backward_finish(const QkvNormRopeBackward& arguments,
                                                      int64_t begin, int64_t end);

}  // namespace cpu

namespace cuda {

/// Runs on the current device, queued on `stream`: one kernel for all heads.
TORCHKILN_EXPORT Status rope(const Rope& arguments, CUstream_st* stream);

/// Runs on the current device, queued on `stream`: one kernel, or two for one norm over all heads
/// of few tokens. Results are bitwise reproducible.
TORCHKILN_EXPORT Status qkv_norm_rope(const QkvNormRope& arguments, Allocate allocate,
                                      CUstream_st* stream);

TORCHKILN_EXPORT Status cache_mask(const CacheMask& arguments, CUstream_st* stream);

/// Computes all gradients in one pass; a second kernel adds the blocks' partial sums of
/// grad_weight. No atomics: results are bitwise reproducible.
TORCHKILN_EXPORT Status qkv_norm_rope_backward(const QkvNormRopeBackward& arguments,
                                               Allocate allocate, CUstream_st* stream);

}  // namespace cuda
}  // namespace torchkiln
