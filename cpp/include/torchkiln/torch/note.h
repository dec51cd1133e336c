#pragma once

// Notes for torchkiln.explain(): why an op copies, casts or picks a kernel, one line each.

#include <c10/util/StringUtil.h>

#include <string>

#include "torchkiln/core/trace.h"

namespace torchkiln::trace {

/// Records a note, made of anything that can be streamed. The text is built only while a listener
/// is registered.
///
///     trace::note("copied: x is not contiguous, strides ", x.strides());
template <class... Parts>
void note(const Parts&... parts) {
  if (Listener* heard = listening()) heard->noted(std::string(c10::str(parts...)).c_str());
}

}  // namespace torchkiln::trace
