#pragma once

#include "choose.h"
#include "detail/reduce/moments.cuh"

// The kernel in sm90.cu.

namespace torchkiln::gemm::sm90 {

/// Computes y, and writes the moments of each part, [parts, out].
Status pixel_convolution(const PixelConvolution& arguments, const cuda::PixelPlan& plan,
                         reduce::Moments* moments, CUstream_st* stream);

}  // namespace torchkiln::gemm::sm90
