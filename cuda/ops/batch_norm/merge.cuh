#pragma once

// The merge of partial moments, for batch norm and for the convolution with moments of its results.

#include "detail/reduce/moments.cuh"
#include "torchkiln/kernels/batch_norm.h"

namespace torchkiln::cuda {

using reduce::Moments;

/// Merges the moments of `parts` parts of each channel. Writes the statistics and moves the running
/// statistics or, if p.moments is not null, writes only the merged moments there. `partial` is
/// [parts, columns] with one or more columns for each channel.
Status merge_moments(const BatchNorm& p, const Moments* partial, int64_t parts, int64_t columns,
                     CUstream_st* stream);

}  // namespace torchkiln::cuda
