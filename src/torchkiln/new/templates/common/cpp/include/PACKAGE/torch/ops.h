#pragma once

// The ops as C++ functions. Each call goes through torch's dispatcher, so that autograd, vmap and
// tracing apply.

#include <ATen/core/Tensor.h>

#include "torchkiln/core/status.h"

namespace PACKAGE {

/// SUMMARY
TORCHKILN_VISIBLE at::Tensor OPNAME(PARAMETERS);

}  // namespace PACKAGE
