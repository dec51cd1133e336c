#pragma once

#include <ATen/core/Tensor.h>

#include "torchkiln/core/status.h"

namespace PACKAGE {

/// The sum of each element and the `window - 1` before it in its row, contiguous.
TORCHKILN_EXPORT at::Tensor OPNAME(const at::Tensor& x, int64_t window);

}  // namespace PACKAGE
