#pragma once

#include <cuda_runtime.h>

#include "torchkiln/kernels/quantize.h"

namespace torchkiln::fp8 {

/// Launches a kernel. `aligned`: whether patches consist of whole vectors, in x and in the results.
Status launch_rows(const Quantize& p, bool aligned, cudaStream_t stream);
Status launch_tiles(const Quantize& p, bool aligned, cudaStream_t stream);

}  // namespace torchkiln::fp8
