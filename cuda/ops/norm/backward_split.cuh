#pragma once

#include "backward_common.cuh"

namespace torchkiln::cuda::norm_gradients {

/// Gradients of norms for rows that cannot be streamed: their offsets from a 16-byte boundary
/// differ between tensors, or they are longer than a cluster holds.
Status split(const NormBackward& p, Allocate allocate, CUstream_st* stream);

}  // namespace torchkiln::cuda::norm_gradients
