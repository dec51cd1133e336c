#pragma once

// Notes for torchkiln.explain(), one line each: why an op copies or casts, or why it selects a
// kernel.

#include <c10/util/StringUtil.h>

#include <string>

#include "torchkiln/core/trace.h"

namespace torchkiln::trace {

/// Records a note. The parts may be of any type that can be streamed. The text is built only while
/// a listener is registered.
///
///     trace::note("copied: x is not contiguous, strides ", x.strides());
template <class... Parts>
void note(const Parts&... parts) {
  if (Listener* heard = listening()) heard->noted(std::string(c10::str(parts...)).c_str());
}

}  // namespace torchkiln::trace
