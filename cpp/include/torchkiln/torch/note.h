#pragma once

// Reasons, for torchkiln.explain(): one line where an op takes a copy, a cast, another road.

#include <c10/util/StringUtil.h>

#include <string>

#include "torchkiln/core/trace.h"

namespace torchkiln::trace {

/// Tells why, in a few words: anything that can be streamed, put together only while somebody
/// listens.
///
///     trace::note("a copy of x: no single stride leads through ", x.sizes());
template <class... Parts>
void note(const Parts&... parts) {
  if (Listener* heard = listening()) heard->noted(std::string(c10::str(parts...)).c_str());
}

}  // namespace torchkiln::trace
