#pragma once

#include "torchkiln/core/dtype.h"
#include "torchkiln/core/workspace.h"

struct CUstream_st;

namespace torchkiln {

/// A convolution with filters of one element, as a product of matrices, and the moments of its
/// results:
///   y[pixel, o] = sum of x[pixel, i] * weight[o, i] over the channels i
/// accumulated in float32. The moments are those of y after rounding.
struct PixelConvolution {
  const void* x;       // [pixels, in], contiguous
  const void* weight;  // [out, in], contiguous
  void* y;             // [pixels, out], contiguous
  double* moments;     // [2 * out + 1], as the moments of one process in BatchNormMerge
  Dtype dtype;         // float16 or bfloat16; of x, weight and y
  int64_t pixels;
  int64_t in;
  int64_t out;
};

namespace cuda {

/// Whether a kernel supports this convolution on the current device. It requires compute capability
/// 9.0, x, weight and y aligned to 16 bytes, and numbers of channels that are multiples of 8.
TORCHKILN_EXPORT bool takes(const PixelConvolution& arguments);

/// Whether that kernel takes less time, as measured, than cuDNN's convolution and another pass over
/// y for its moments.
TORCHKILN_EXPORT bool gains(const PixelConvolution& arguments);

/// Runs on the current device, queued on `stream`. The first kernel computes the convolution and
/// the moments of parts of the pixels, the second merges the moments. Results are bitwise
/// reproducible.
TORCHKILN_EXPORT Status pixel_convolution(const PixelConvolution& arguments, Allocate allocate,
                                          CUstream_st* stream);

}  // namespace cuda
}  // namespace torchkiln
