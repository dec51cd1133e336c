#pragma once

// The merge of partial moments, for batch norm and for the convolution with moments of its results.

#include "detail/reduce/moments.cuh"
#include "torchkiln/kernels/batch_norm.h"

namespace torchkiln::cuda {

using reduce::Moments;

/// Merges the moments of `parts` parts of each channel into the statistics and the running
/// statistics, or into p.moments. `partial` is [parts, columns] with one or more columns for each
/// channel.
Status merge_moments(const BatchNorm& p, const Moments* partial, int64_t parts, int64_t columns,
                     CUstream_st* stream);

}  // namespace torchkiln::cuda
