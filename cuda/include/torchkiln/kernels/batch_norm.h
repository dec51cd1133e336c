#pragma once

#include <cstddef>
#include <cstdint>

#include "torchkiln/core/activations.h"
#include "torchkiln/core/workspace.h"

struct CUstream_st;

namespace torchkiln {

/// The tensor besides grad and x that backward needs for the derivative of the activation. Without
/// a residual, backward recomputes the activation's argument from x. With a residual, relu needs
/// one bit per element; other activations with a derivative need the residual.
inline Saved kept_by_batch_norm(Activation activation, bool has_residual) {
  const Saved saved = saved_by(activation);
  if (!has_residual) return Saved::nothing;
  return saved == Saved::output ? Saved::input : saved;
}

/// A dense tensor seen as [outer, channels, inner]. If channels are adjacent in memory
/// (channels_last), inner is 1 and each pixel is a row of channels.
struct ChannelLayout {
  int64_t outer;
  int64_t channels;
  int64_t inner;

  int64_t numel() const { return outer * channels * inner; }
  /// Elements per channel.
  int64_t count() const { return outer * inner; }
};

/// A running statistic: [channels] of running_dtype; null if there is none.
struct RunningStatistic {
  void* data;
  int64_t stride;
};

/// y = activation(n * weight + bias + residual) with n = (x - mean) * rstd for each channel and
/// rstd = 1 / sqrt(variance + eps). If `training`, mean and variance are those of x, and the
/// running statistics move towards them by `momentum` (running_var towards the unbiased variance).
/// Otherwise the running statistics are used.
struct BatchNorm {
  const void* x;
  const void* residual;  // null if there is none
  const void* weight;    // [channels], contiguous; null for ones
  const void* bias;      // [channels], contiguous; null for zeros
  RunningStatistic running_mean;
  RunningStatistic running_var;
  void* y;
  /// The signs of y, if backward needs only those: bit i % 8 of byte i / 8 is set if element i in
  /// memory is not <= 0. Null if backward does not need them.
  uint8_t* signs;
  /// [3, channels] of the compute type: the mean, rounded; its rounding error; rstd. Null if not
  /// wanted; training needs them unless `moments` is given. The rounding error of the mean keeps
  /// x - mean exact where the mean is far from 0.
  void* statistics;
  /// The moments of x, which batch_norm_moments() writes instead of statistics; otherwise null.
  double* moments;
  Dtype dtype;            // dtype of x, residual and y
  Dtype parameter_dtype;  // dtype of weight and bias: dtype, or float32 for half precision
  Dtype running_dtype;    // of the running statistics: dtype, or float32 for half precision
  Activation activation;
  bool training;
  double momentum;
  double eps;
  ChannelLayout layout;  // of x, residual and y
  void* workspace;       // has the size that cpu::split() returns; CUDA launchers allocate theirs
};

/// Merges the moments of the processes of a group. The moments of a process are [2 * channels + 1]:
/// the mean of each channel, the sum of its squared distances from the mean, and the elements per
/// channel. All are 0 for a process without elements.
struct BatchNormMerge {
  const double* moments;  // [processes, 2 * channels + 1]
  int64_t processes;
  int64_t channels;
  RunningStatistic running_mean;
  RunningStatistic running_var;
  const int64_t* batches;  // running statistics move by 1 / batches; null to move by momentum
  void* statistics;        // as in BatchNorm, over all processes
  double* count;           // [1]: elements per channel in all processes
  Dtype dtype;             // dtype of x
  Dtype running_dtype;
  double momentum;
  double eps;
};

/// Gradients of BatchNorm, with g = grad * activation'(n * weight + bias + residual):
///   grad_residual = g
///   grad_bias     = sum of g over a channel
///   grad_weight   = sum of g * n over a channel
///   grad_x        = (g - (grad_bias + n * grad_weight) / count) * rstd * weight if training,
///                   else g * rstd * weight
struct BatchNormBackward {
  const void* grad;
  /// A second incoming gradient, null if there is none. The incoming gradient is then grad +
  /// second, rounded. It requires signs and grad_residual. CPU kernels ignore it.
  const void* second;
  const void* x;
  const void* residual;  // null if there is none, or if kept_by_batch_norm() is not the input
  const uint8_t* signs;  // null if kept_by_batch_norm() is not the sign
  const void* weight;
  const void* bias;
  const void* statistics;  // from forward
  void* grad_x;            // null if not wanted; so are the gradients below
  void* grad_weight;       // has parameter_dtype
  void* grad_bias;
  void* grad_residual;
  Dtype dtype;
  Dtype parameter_dtype;
  Activation activation;
  bool training;
  ChannelLayout layout;
  /// [1]: elements per channel in all processes of a group; null for the number in x.
  const double* count;
  /// [2, channels] of the compute type: slope and level in
  ///   grad_x = (g - slope * (x - mean) - level) * rstd * weight,
  /// with the rounded mean. Both are sums over the elements, so the caller adds them over the
  /// processes of a group. cuda::batch_norm_backward() allocates its own.
  void* coefficients;
  void* workspace;  // as in BatchNorm

  /// Whether the sums over the channels are needed.
  TORCHKILN_FUNCTION bool needs_sums() const {
    return grad_weight != nullptr || grad_bias != nullptr || coefficients != nullptr;
  }
  /// Whether grad_residual holds g exactly, because each g is the incoming gradient or 0.
  bool residual_gradient_is_exact() const {
    const Saved saved = saved_by(activation);
    return saved == Saved::sign || saved == Saved::nothing;
  }
};

/// Windows of a max pool over the last two dimensions of a tensor [images, channels, height, width]
/// with adjacent channels. Padding is at most half a window, so each window has at least one pixel.
struct PoolWindows {
  int64_t images;
  int64_t height;
  int64_t width;
  int64_t pooled_height;
  int64_t pooled_width;
  int kernel[2];
  int stride[2];
  int padding[2];

  int64_t count() const { return images * pooled_height * pooled_width; }
};

/// y of BatchNorm, then the largest y in each window. Each y is rounded before it is compared.
/// Among equal values the first one counts; if the window has NaN, the last NaN.
struct BatchNormPool {
  BatchNorm norm;  // y is pooled; no residual and no signs
  PoolWindows windows;
  uint8_t* places;  // as y: index of the largest pixel in its window, row * kernel[1] + column
};

/// The gradients for BatchNormPool, as in BatchNormBackward. The incoming gradient of a pixel is
/// the sum of the gradients of those windows of which it is the largest.
struct BatchNormPoolBackward {
  BatchNormBackward norm;  // grad is pooled; residual, signs, coefficients are null
  PoolWindows windows;
  const uint8_t* places;
};

namespace cpu {

/// The split of a training forward: tasks are chunks of the elements, results are the channels.
TORCHKILN_EXPORT Split split(const BatchNorm& arguments);

/// Writes the moments of the chunks begin <= chunk < end to the workspace.
TORCHKILN_EXPORT Status batch_norm_moments(const BatchNorm& arguments, int64_t begin, int64_t end);

/// Merges the moments of the channels begin <= channel < end into `statistics` and into the running
/// statistics, or into `moments` if they are wanted.
TORCHKILN_EXPORT Status batch_norm_finish(const BatchNorm& arguments, int64_t begin, int64_t end);

/// Computes y for the elements begin <= i < end in memory; if signs are wanted, begin is a multiple
/// of 8. `statistics` must have been computed.
TORCHKILN_EXPORT Status batch_norm(const BatchNorm& arguments, int64_t begin, int64_t end);

/// Merges the moments of the channels begin <= channel < end.
TORCHKILN_EXPORT Status batch_norm_merge(const BatchNormMerge& arguments, int64_t begin,
                                         int64_t end);

/// The split of a backward: tasks are chunks of the elements, results are the channels.
TORCHKILN_EXPORT Split split(const BatchNormBackward& arguments);

/// Writes grad_residual, without training grad_x, and the sums of the chunks begin <= chunk < end.
TORCHKILN_EXPORT Status batch_norm_sums(const BatchNormBackward& arguments, int64_t begin,
                                        int64_t end);

/// Adds the sums of all chunks for the channels begin <= channel < end: grad_weight, grad_bias, and
/// the coefficients of grad_x.
TORCHKILN_EXPORT Status batch_norm_sums_finish(const BatchNormBackward& arguments, int64_t begin,
                                               int64_t end);

/// Computes grad_x in training for the elements begin <= i < end in memory; otherwise
/// batch_norm_sums() has written it.
TORCHKILN_EXPORT Status batch_norm_backward(const BatchNormBackward& arguments, int64_t begin,
                                            int64_t end);

}  // namespace cpu

namespace cuda {

/// Runs on the current device, queued on `stream`. Training takes three kernels (partial moments of
/// each channel, their merge, y), or one cooperative kernel on 9.0 for adjacent channels in whole
/// vectors, without residual and signs.
TORCHKILN_EXPORT Status batch_norm(const BatchNorm& arguments, Allocate allocate,
                                   CUstream_st* stream);

/// The steps of batch_norm() in training for a group of processes: the moments of x, their merge,
/// y.
TORCHKILN_EXPORT Status batch_norm_moments(const BatchNorm& arguments, Allocate allocate,
                                           CUstream_st* stream);
TORCHKILN_EXPORT Status batch_norm_merge(const BatchNormMerge& arguments, CUstream_st* stream);
TORCHKILN_EXPORT Status batch_norm_outputs(const BatchNorm& arguments, CUstream_st* stream);

/// Computes the wanted gradients in three kernels (partial sums of each channel, their total,
/// grad_x), or in one cooperative kernel: in training on 9.0 for adjacent channels in whole
/// vectors, with grad_residual only up to 2^24 elements. No atomics: results are bitwise
/// reproducible.
TORCHKILN_EXPORT Status batch_norm_backward(const BatchNormBackward& arguments, Allocate allocate,
                                            CUstream_st* stream);

/// The steps of batch_norm_backward(): batch_norm_backward_sums() computes all gradients but
/// grad_x, and the coefficients if they are not null; batch_norm_backward_input() computes grad_x
/// from the coefficients.
TORCHKILN_EXPORT Status batch_norm_backward_sums(const BatchNormBackward& arguments,
                                                 Allocate allocate, CUstream_st* stream);
TORCHKILN_EXPORT Status batch_norm_backward_input(const BatchNormBackward& arguments,
                                                  CUstream_st* stream);

/// Whether there are kernels for a max pool of x: no float64, adjacent channels in whole vectors,
/// fewer than 2^31 pixels and windows, each of at most 256 pixels.
inline bool takes(Dtype dtype, const ChannelLayout& layout, const PoolWindows& windows) {
  return dtype != Dtype::float64 && layout.inner == 1 && layout.channels % 8 == 0 &&
         layout.outer <= INT32_MAX && windows.count() <= INT32_MAX &&
         int64_t{windows.kernel[0]} * windows.kernel[1] <= 256;
}

/// batch_norm() in training followed by a max pool, and its backward. Each takes three kernels.
TORCHKILN_EXPORT Status batch_norm_pool(const BatchNormPool& arguments, Allocate allocate,
                                        CUstream_st* stream);
TORCHKILN_EXPORT Status batch_norm_pool_backward(const BatchNormPoolBackward& arguments,
                                                 Allocate allocate, CUstream_st* stream);

}  // namespace cuda
}  // namespace torchkiln
