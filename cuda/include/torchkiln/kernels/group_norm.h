#pragma once

#include "torchkiln/core/activations.h"
#include "torchkiln/core/scalar_math.h"
#include "torchkiln/core/workspace.h"

struct CUstream_st;

namespace torchkiln {

/// A dense tensor of `batch` samples: planes of `inner` elements for each channel, or rows of
/// adjacent channels for each of the `inner` pixels (channels_last). A group has channels / groups
/// adjacent channels of a sample.
struct GroupLayout {
  int64_t batch;
  int64_t channels;
  int64_t groups;
  int64_t inner;
  bool channels_last;

  TORCHKILN_FUNCTION int64_t channels_per_group() const { return channels / groups; }
  /// Groups per tensor: those of all samples.
  TORCHKILN_FUNCTION int64_t all_groups() const { return batch * groups; }
  /// Elements per group.
  TORCHKILN_FUNCTION int64_t count() const { return channels_per_group() * inner; }
};

/// y = activation(n * weight + bias) with n = (x - mean) * rstd for each group of a sample and
/// rstd = 1 / sqrt(variance + eps).
struct GroupNorm {
  const void* x;
  const void* weight;  // [channels], contiguous; null for ones
  const void* bias;    // [channels], contiguous; null for zeros
  void* y;
  /// [3, batch, groups] of the compute type: the mean, rounded; its rounding error; rstd.
  void* statistics;
  Dtype dtype;            // dtype of x and y
  Dtype parameter_dtype;  // dtype of weight and bias: dtype, or float32 for half precision
  Activation activation;
  double eps;
  GroupLayout layout;  // of x and y
};

/// Gradients of GroupNorm, with g = grad * activation'(n * weight + bias):
///   grad_bias   = sum of g over a channel of all samples
///   grad_weight = sum of g * n over a channel of all samples
///   grad_x      = (g * weight - mean of g * weight - n * (mean of g * weight * n)) * rstd with the
///                 means over a group
struct GroupNormBackward {
  const void* grad;
  const void* x;
  const void* weight;
  const void* bias;
  const void* statistics;  // from forward
  void* grad_x;            // null if not wanted; so are the gradients below
  void* grad_weight;       // has parameter_dtype
  void* grad_bias;
  Dtype dtype;
  Dtype parameter_dtype;
  Activation activation;
  GroupLayout layout;
  void* workspace;  // has the size that cpu::split() returns; CUDA launchers allocate theirs
};

namespace cpu {

/// Computes statistics and y of the groups begin <= group < end of all samples.
TORCHKILN_EXPORT Status group_norm(const GroupNorm& arguments, int64_t begin, int64_t end);

/// The split of a backward: tasks are the groups of all samples, or parts of them if groups are
/// short; results are the channels.
TORCHKILN_EXPORT Split split(const GroupNormBackward& arguments);

/// Computes grad_x and the sums over each channel for the tasks begin <= task < end.
TORCHKILN_EXPORT Status group_norm_backward(const GroupNormBackward& arguments, int64_t begin,
                                            int64_t end);

/// Adds the sums of all tasks for the channels begin <= channel < end.
TORCHKILN_EXPORT Status group_norm_backward_finish(const GroupNormBackward& arguments,
                                                   int64_t begin, int64_t end);

}  // namespace cpu

namespace cuda {

/// Runs on the current device, queued on `stream`: one kernel for groups that fit in registers,
/// else three (partial moments of each group, their merge, y).
TORCHKILN_EXPORT Status group_norm(const GroupNorm& arguments, Allocate allocate,
                                   CUstream_st* stream);

/// Computes the wanted gradients in up to four kernels: partial sums of each channel, totals for
/// each group, totals over the samples, and grad_x. No atomics: results are bitwise reproducible.
TORCHKILN_EXPORT Status group_norm_backward(const GroupNormBackward& arguments, Allocate allocate,
                                            CUstream_st* stream);

}  // namespace cuda
}  // namespace torchkiln
