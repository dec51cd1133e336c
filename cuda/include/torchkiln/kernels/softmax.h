#pragma once

#include "torchkiln/core/layout.h"
#include "torchkiln/core/workspace.h"

struct CUstream_st;

namespace torchkiln {

/// The elements of a row that take part: the mask is true and, if causal, the index is at most that
/// of the row's query. Other elements count as -infinity.
struct RowMask {
  const bool* data;  // null: no mask
  Layout<1> rows;    // sizes of the row dimensions, in the order of the rows; strides of the mask
  int64_t stride;    // stride of the mask along a row: 0 or 1
  bool causal;       // only elements i <= r % queries of row r take part
  int64_t queries;

  bool any() const { return data != nullptr || causal; }
};

/// Longest rows, in bytes, of non-adjacent elements for which a CUDA kernel is fast. A block has at
/// least 8 such rows, so a few long ones would leave SMs idle.
constexpr int64_t most_strided_bytes(int64_t rows) { return rows < 512 ? 4 * 1024 : 24 * 1024; }

/// y = softmax(x * scale), or its logarithm, over the middle dimension of [outer, length, inner].
struct Softmax {
  const void* x;
  void* y;  // contiguous
  Dtype dtype;
  bool log;
  double scale;
  int64_t outer;
  int64_t length;
  int64_t inner;
  int64_t outer_stride;  // of x, in elements; fastest if stride or inner_stride is 1
  int64_t stride;
  int64_t inner_stride;  // ignored if inner is 1
  RowMask mask;          // of the `outer` rows; only if inner is 1
};

/// grad_x = (grad - sum of (grad * y)) * y * scale; for the logarithm, (grad - exp(y) * sum of
/// grad) * scale. 0 for elements that the mask excludes.
struct SoftmaxBackward {
  const void* grad;
  const void* y;  // contiguous
  void* grad_x;   // contiguous
  Dtype dtype;
  bool log;
  double scale;
  int64_t outer;
  int64_t length;
  int64_t inner;
  int64_t outer_stride;  // of grad
  int64_t stride;
  int64_t inner_stride;
  RowMask mask;
};

namespace cpu {

/// Computes the rows begin <= row < end of outer * inner.
TORCHKILN_EXPORT Status softmax(const Softmax& arguments, int64_t begin, int64_t end);
TORCHKILN_EXPORT Status softmax_backward(const SoftmaxBackward& arguments, int64_t begin,
                                         int64_t end);

}  // namespace cpu

namespace cuda {

/// Runs on the current device, queued on `stream`.
TORCHKILN_EXPORT Status softmax(const Softmax& arguments, Allocate allocate, CUstream_st* stream);
TORCHKILN_EXPORT Status softmax_backward(const SoftmaxBackward& arguments, Allocate allocate,
                                         CUstream_st* stream);

}  // namespace cuda
}  // namespace torchkiln
