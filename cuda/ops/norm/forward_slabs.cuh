#pragma once

// Norms in slabs, for long rows: weight and bias are read once, and each element of x.

#include "slab_plan.cuh"
#include "torchkiln/core/workspace.h"
#include "torchkiln/kernels/norm.h"

namespace torchkiln::cuda {

/// Its `blocks` is 0 if slabs do not support the call, or another kernel is faster.
norm_slabs::SlabPlan plan_norm_slabs(const Norm& p, device::Alignment alignment);

Status norm_in_slabs(const Norm& p, device::Alignment alignment, const norm_slabs::SlabPlan& plan,
                     Allocate allocate, CUstream_st* stream);

}  // namespace torchkiln::cuda
