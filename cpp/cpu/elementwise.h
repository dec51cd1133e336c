#pragma once

// The CPU twin of cuda/include/torchkiln/elementwise.cuh: out[i] = functor(inputs...) for a range
// of a dense output. The range is cut where a row of the innermost dimension ends, and the rows
// into runs that stay in the first-level cache while they are converted, computed and converted
// back.

#include <algorithm>
#include <utility>

#include "float16.h"
#include "torchkiln/layout.h"

namespace torchkiln::cpu::TORCHKILN_ISA {

inline constexpr int64_t kRun = 512;

/// A position in the iteration space of a layout.
template <int Arity>
struct Cursor {
  int64_t place[kMaxRank] = {};
  int64_t offset[Arity] = {};

  Cursor(const Layout<Arity>& layout, int64_t at) {
    for (int d = 0; d < layout.rank; ++d) {
      place[d] = at % layout.size[d];
      at /= layout.size[d];
      for (int k = 0; k < Arity; ++k) offset[k] += place[d] * layout.stride[k][d];
    }
  }

  /// Moves on by `count`, which does not lead past the end of the current row.
  void advance(const Layout<Arity>& layout, int64_t count) {
    place[0] += count;
    for (int k = 0; k < Arity; ++k) offset[k] += count * layout.stride[k][0];
    for (int d = 0; d + 1 < layout.rank && place[d] == layout.size[d]; ++d) {
      place[d] = 0;
      ++place[d + 1];
      for (int k = 0; k < Arity; ++k) {
        offset[k] += layout.stride[k][d + 1] - layout.size[d] * layout.stride[k][d];
      }
    }
  }
};

template <class Functor, class C, int Arity, size_t... K>
void apply(const Functor& functor, C* out, const C* const (&in)[Arity], int64_t count,
           std::index_sequence<K...>) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) out[i] = functor(in[K][i]...);
}

template <class Out, class Functor, int Arity>
Status elementwise(const Functor& functor, const Elementwise<Arity>& arguments, int64_t begin,
                   int64_t end) {
  using C = Compute<Out>;
  constexpr bool kDirect = std::is_same_v<Out, C>;
  const Layout<Arity>& layout = arguments.layout;
  Cursor<Arity> cursor(layout, begin);
  C buffers[Arity][kRun];
  C results[kRun];
  for (int64_t at = begin; at < end;) {
    const int64_t row_rest = layout.rank == 0 ? 1 : layout.size[0] - cursor.place[0];
    const int64_t count = std::min({end - at, row_rest, kRun});
    const C* in[Arity];
    for (int k = 0; k < Arity; ++k) {
      in[k] = read_run(buffers[k], arguments.in[k], cursor.offset[k], layout.stride[k][0], count,
                       arguments.in_dtype[k]);
    }
    Out* out = static_cast<Out*>(arguments.out) + at;
    if constexpr (kDirect) {
      apply(functor, out, in, count, std::make_index_sequence<Arity>{});
    } else {
      apply(functor, results, in, count, std::make_index_sequence<Arity>{});
      narrow_run(out, results, count);
    }
    cursor.advance(layout, count);
    at += count;
  }
  return {};
}

}  // namespace torchkiln::cpu::TORCHKILN_ISA
