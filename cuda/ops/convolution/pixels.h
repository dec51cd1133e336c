#pragma once

#include "detail/reduce/moments.cuh"
#include "torchkiln/kernels/convolution.h"

// The kernel in sm90.cu.

namespace torchkiln::gemm::sm90 {

/// The number of parts into which the pixels are split on this many SMs; 0 if TMA cannot read the
/// operands.
int64_t parts_of(const PixelConvolution& arguments, int multiprocessors);

/// The share of the SMs that compute a tile, averaged over the run.
double share_at_work(const PixelConvolution& arguments, int multiprocessors);

/// Also writes the moments of the parts, [parts, out].
Status pixel_convolution(const PixelConvolution& arguments, reduce::Moments* moments, int64_t parts,
                         CUstream_st* stream);

}  // namespace torchkiln::gemm::sm90
