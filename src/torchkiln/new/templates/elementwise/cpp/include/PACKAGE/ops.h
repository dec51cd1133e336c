#pragma once

#include <ATen/core/Tensor.h>

#include "torchkiln/core/status.h"

namespace PACKAGE {

/// x * sigmoid(scale * gate), contiguous; `gate` has the shape and the dtype of `x`.
TORCHKILN_EXPORT at::Tensor OPNAME(const at::Tensor& x, const at::Tensor& gate, double scale);

}  // namespace PACKAGE
