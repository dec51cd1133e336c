#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/MaybeOwned.h>

namespace torchkiln {

/// A borrowed tensor, or an owned copy. Borrowing avoids a second reference to a tensor that Python
/// owns, which would take the GIL (0.1 us).
using MaybeCopy = c10::MaybeOwned<at::Tensor>;

}  // namespace torchkiln
