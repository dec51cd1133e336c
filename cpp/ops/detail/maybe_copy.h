#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/MaybeOwned.h>

namespace torchkiln {

/// A tensor itself, borrowed, or a copy of it. A second reference to a tensor that Python holds
/// takes the interpreter's lock, 0.1 us.
using MaybeCopy = c10::MaybeOwned<at::Tensor>;

}  // namespace torchkiln
