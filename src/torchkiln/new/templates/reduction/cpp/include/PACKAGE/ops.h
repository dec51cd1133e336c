#pragma once

#include <ATen/core/Tensor.h>

#include "torchkiln/core/status.h"

namespace PACKAGE {

/// The sum of x * x over the last dimension of `x`, contiguous.
TORCHKILN_EXPORT at::Tensor OPNAME(const at::Tensor& x);

}  // namespace PACKAGE
