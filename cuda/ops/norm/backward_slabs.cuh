#pragma once

// How rows are cut into slabs, for gradients of norms on compute capability 9.0 and later.

#include "backward_common.cuh"

namespace torchkiln::cuda::norm_gradients {

/// blocks is 0 if the kernel does not support the call.
struct SlabPlan {
  int blocks;     // of a team, one per slab
  int columns;    // of a slab
  int64_t teams;  // each takes one row after another
  int stages;     // slabs in shared memory or in flight
  int lag;        // rows between the sums of a row and its gradients
  int tensor_bytes;
  int shared_bytes;
};

/// Whether slabs are faster than streamed rows or, where those are not possible, than split rows.
bool prefers_slabs(const NormBackward& p, Alignment alignment, bool can_stream);

SlabPlan plan_slabs(const NormBackward& p, Alignment alignment);

Status slabs(const NormBackward& p, Alignment alignment, const SlabPlan& plan, Allocate allocate,
             CUstream_st* stream);

}  // namespace torchkiln::cuda::norm_gradients
