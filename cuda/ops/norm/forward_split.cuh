#pragma once

#include "torchkiln/core/workspace.h"
#include "torchkiln/device/alignment.cuh"
#include "torchkiln/kernels/norm.h"

namespace torchkiln::cuda {

/// Norms of rows that the registers of a cluster do not hold, with any offset from a 16-byte
/// boundary.
Status split_norm(const Norm& p, device::Alignment alignment, Allocate allocate,
                  CUstream_st* stream);

}  // namespace torchkiln::cuda
