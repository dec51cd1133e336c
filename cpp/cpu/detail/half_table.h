#pragma once

// Functions of one half-precision number, as tables of all 65,536 results. A lookup takes less time
// than an exponential, and the numbers that are common in a tensor use a few KiB of the table.

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "torchkiln/cpu/elementwise.h"

namespace torchkiln::cpu::TORCHKILN_ISA {

/// Fewest elements that are looked up. For fewer elements computing is faster, because the table
/// may not be in the caches.
inline constexpr int64_t kFewestOfTable = 1 << 14;

template <class To>
To narrow(float value) {
  if constexpr (std::is_same_v<To, Half>) {
    return narrow_half(value);
  } else if constexpr (std::is_same_v<To, BFloat16>) {
    return narrow_bfloat16(value);
  } else {
    return value;
  }
}

/// The table of function(x), rounded to To, for each half-precision number x; its bits are the
/// index. The table is computed at its first use and never freed, because threads may outlive
/// static objects.
template <class T, class To, class Function>
const To* half_table() {
  static const To* const table = [] {
    constexpr int32_t kCount = 1 << 16;
    To* const made = new To[kCount];
    for (int32_t i = 0; i < kCount; ++i)
      made[i] = narrow<To>(Function{}(widen(T{static_cast<uint16_t>(i)})));
    return made;
  }();
  return table;
}

/// Whether a range of elements can use a table: long enough, all operands of type T, and adjacent
/// along dimension 0.
template <class T, int Inputs>
bool suits_table(const Elementwise<Inputs>& arguments, int64_t begin, int64_t end) {
  bool found = sizeof(T) == 2 && end - begin >= kFewestOfTable && arguments.layout.rank > 0 &&
               arguments.layout.out_stride[0][0] == 1;
  for (int k = 0; k < Inputs; ++k)
    found = found && arguments.in_dtype[k] == arguments.dtype && arguments.layout.stride[k][0] == 1;
  return found;
}

/// Calls body(out, in, count) for the runs in a range of elements of type T.
template <class T, int Inputs, class Body>
void for_each_run(const Elementwise<Inputs>& arguments, int64_t begin, int64_t end,
                  const Body& body) {
  const Layout<Inputs>& layout = arguments.layout;
  Cursor<Inputs, 1> cursor(layout, begin);
  for (int64_t at = begin; at < end;) {
    const int64_t count = std::min({end - at, layout.size[0] - cursor.index[0], kRun});
    const T* in[Inputs];
    for (int k = 0; k < Inputs; ++k)
      in[k] = static_cast<const T*>(arguments.in[k]) + cursor.offset[k];
    body(static_cast<T*>(arguments.out[0]) + cursor.out_offset[0], in, count);
    cursor.advance(layout, count);
    at += count;
  }
}

}  // namespace torchkiln::cpu::TORCHKILN_ISA
