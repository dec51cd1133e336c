#pragma once

#include "backward_common.cuh"

namespace torchkiln::cuda::norm_gradients {

/// Gradients of norms for rows that are neither cut into slabs nor streamed: float64, GPUs before
/// Hopper, the longest rows, and short ones whose offsets differ between tensors.
Status split(const NormBackward& p, Allocate allocate, CUstream_st* stream);

}  // namespace torchkiln::cuda::norm_gradients
