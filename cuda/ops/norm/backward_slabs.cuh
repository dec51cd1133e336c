#pragma once

// Gradients of norms in slabs, for rows that no block holds or that begin anywhere.

#include "backward_common.cuh"
#include "slab_plan.cuh"

namespace torchkiln::cuda::norm_gradients {

/// Whether slabs are faster than streamed rows or, where those are not possible, than split rows.
bool prefers_slabs(const NormBackward& p, Alignment alignment, bool can_stream);

/// Its `blocks` is 0 if the kernel does not support the call.
norm_slabs::SlabPlan plan_slabs(const NormBackward& p, Alignment alignment);

Status slabs(const NormBackward& p, Alignment alignment, const norm_slabs::SlabPlan& plan,
             Allocate allocate, CUstream_st* stream);

}  // namespace torchkiln::cuda::norm_gradients
