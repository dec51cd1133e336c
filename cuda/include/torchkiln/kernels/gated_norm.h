#pragma once

#include <cstddef>

#include "torchkiln/core/dtype.h"
#include "torchkiln/core/workspace.h"

struct CUstream_st;

namespace torchkiln {

/// RMS norm of each group of a token, and a gate: with s = silu(gate)
///   y = x * rstd * (weight + weight_offset) * s, where rstd = 1 / sqrt(mean of x^2 + eps)
/// or if `gate_first`, with z = x * s
///   y = z * rstd * (weight + weight_offset), where rstd = 1 / sqrt(mean of z^2 + eps)
/// with the means over the columns of a group.
struct GatedNorm {
  const void* x;       // [tokens, groups, columns], the elements of a token adjacent
  const void* gate;    // as x
  const void* weight;  // [groups, columns], contiguous; null for ones, ignoring weight_offset
  void* y;             // as x, contiguous
  void* rstd;          // [tokens, groups] of the compute type; null if not wanted
  Dtype dtype;         // dtype of x, gate and y
  Dtype weight_dtype;  // dtype, or float32 for half precision
  bool gate_first;
  double eps;
  double weight_offset;
  int64_t tokens;
  int64_t groups;
  int64_t columns;
  int64_t x_stride;  // from token to token
  int64_t gate_stride;
};

/// Gradients of GatedNorm: with s = silu(gate), w = weight + weight_offset, sums over the tokens
/// and means over the columns of a group
///   n = x * rstd             or if gate_first   n = x * s * rstd
///   d = grad * w * s                            d = grad * w
///   p = (d - n * mean of (d * n)) * rstd
///   grad_x = p                                  grad_x = p * s
///   grad_gate = grad * n * w * silu'(gate)      grad_gate = p * x * silu'(gate)
///   grad_weight = sum of grad * n * s           grad_weight = sum of grad * n
struct GatedNormBackward {
  const void* grad;    // as x
  const void* x;       // as in GatedNorm
  const void* gate;    // as x
  const void* weight;  // as in GatedNorm
  const void* rstd;    // from forward
  void* grad_x;        // as x, contiguous; null if not wanted
  void* grad_gate;     // as x, contiguous; null if not wanted
  void* grad_weight;   // [groups, columns] of weight_dtype; null if not wanted
  Dtype dtype;         // dtype of grad, x, gate, grad_x and grad_gate
  Dtype weight_dtype;
  bool gate_first;
  double weight_offset;
  int64_t tokens;
  int64_t groups;
  int64_t columns;
  int64_t grad_stride;  // from token to token
  int64_t x_stride;
  int64_t gate_stride;
  void* workspace;  // has the size that cpu::split() returns; CUDA launchers allocate theirs
};

namespace cpu {

/// Computes the tokens begin <= token < end.
TORCHKILN_EXPORT Status gated_norm(const GatedNorm& arguments, int64_t begin, int64_t end);

/// The split of a backward: tasks are chunks of tokens; results are the elements of grad_weight, if
/// that is wanted.
TORCHKILN_EXPORT Split split(const GatedNormBackward& arguments);

/// Computes grad_x and grad_gate of the chunks begin <= chunk < end, and writes their partial sums
/// of grad_weight to the workspace.
TORCHKILN_EXPORT Status gated_norm_backward(const GatedNormBackward& arguments, int64_t begin,
                                            int64_t end);

/// Adds the sums of all chunks for the elements begin <= i < end of grad_weight.
TORCHKILN_EXPORT Status gated_norm_backward_finish(const GatedNormBackward& arguments,
                                                   int64_t begin, int64_t end);

}  // namespace cpu

namespace cuda {

/// Whether the kernels support these rows: a group of a token must fit in the registers of a block
/// or, in the forward pass, of a cluster.
TORCHKILN_EXPORT bool holds_rows(const GatedNorm& arguments);
TORCHKILN_EXPORT bool holds_rows(const GatedNormBackward& arguments);

/// Runs on the current device, queued on `stream`: one pass over the tensors.
TORCHKILN_EXPORT Status gated_norm(const GatedNorm& arguments, CUstream_st* stream);

/// Computes all gradients in one pass; a second kernel adds the blocks' partial sums of
/// grad_weight. No atomics: results are bitwise reproducible.
TORCHKILN_EXPORT Status gated_norm_backward(const GatedNormBackward& arguments, Allocate allocate,
                                            CUstream_st* stream);

}  // namespace cuda
}  // namespace torchkiln
