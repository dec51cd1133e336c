#pragma once

// The CPU counterpart of cuda/include/torchkiln/device/elementwise.cuh: outputs =
// functor(inputs...) for a range of the iteration space. The range is split into runs, which end at
// the latest at the end of an innermost row. A run stays in the L1 cache while it is converted,
// computed and converted back.

#include <algorithm>
#include <utility>

#include "torchkiln/core/functors.h"
#include "torchkiln/core/layout.h"
#include "torchkiln/cpu/half.h"

namespace torchkiln::cpu::TORCHKILN_ISA {

// Maximum number of elements per run.
inline constexpr int64_t kRun = 512;

/// A position in the iteration space of a layout, and its offset in each operand.
template <int Inputs, int Outputs>
struct Cursor {
  int64_t index[kMaxRank] = {};
  int64_t offset[Inputs] = {};
  int64_t out_offset[Outputs] = {};

  Cursor(const Layout<Inputs, Outputs>& layout, int64_t at) {
    for (int d = 0; d < layout.rank; ++d) {
      index[d] = at % layout.size[d];
      at /= layout.size[d];
      move(layout, d, index[d]);
    }
  }

  /// Advances by `count` elements, at most to the end of the current row.
  void advance(const Layout<Inputs, Outputs>& layout, int64_t count) {
    index[0] += count;
    move(layout, 0, count);
    for (int d = 0; d + 1 < layout.rank && index[d] == layout.size[d]; ++d) {
      index[d] = 0;
      ++index[d + 1];
      move(layout, d, -layout.size[d]);
      move(layout, d + 1, 1);
    }
  }

 private:
  void move(const Layout<Inputs, Outputs>& layout, int d, int64_t count) {
    for (int k = 0; k < Inputs; ++k) offset[k] += count * layout.stride[k][d];
    for (int o = 0; o < Outputs; ++o) out_offset[o] += count * layout.out_stride[o][d];
  }
};

template <class Functor, class C, class T, int Inputs, size_t... K>
void apply(const Functor& functor, C* const (&out)[1], const T* const (&in)[Inputs], int64_t count,
           std::index_sequence<K...>) {
  C* const to = out[0];
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) to[i] = functor(widen(in[K][i])...);
}

template <class Functor, class C, class T, int Inputs, size_t... K>
void apply(const Functor& functor, C* const (&out)[2], const T* const (&in)[Inputs], int64_t count,
           std::index_sequence<K...>) {
  C* const first = out[0];
  C* const second = out[1];
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    const Pair<C> both = functor(widen(in[K][i])...);
    first[i] = both.first;
    second[i] = both.second;
  }
}

template <class Functor, class C, class T, int Inputs, size_t... K>
void apply(const Functor& functor, C* const (&out)[3], const T* const (&in)[Inputs], int64_t count,
           std::index_sequence<K...>) {
  C* const first = out[0];
  C* const second = out[1];
  C* const third = out[2];
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    const Triple<C> all = functor(widen(in[K][i])...);
    first[i] = all.first;
    second[i] = all.second;
    third[i] = all.third;
  }
}

/// Whether runs need buffers: an operand has another type than C, or gaps along dimension 0.
/// Without buffers a run may have any length; long runs are faster if the output is in new pages.
template <class C, int Inputs, int Outputs>
bool needs_buffers(const Elementwise<Inputs, Outputs>& arguments) {
  bool found = arguments.dtype != DtypeOf<C>::value;
  for (int k = 0; k < Inputs; ++k)
    found =
        found || arguments.in_dtype[k] != DtypeOf<C>::value || arguments.layout.stride[k][0] != 1;
  for (int o = 0; o < Outputs; ++o) found = found || arguments.layout.out_stride[o][0] != 1;
  return found;
}

/// Whether all inputs are bfloat16 without gaps along dimension 0. Then the loop over them widens
/// each element in a register. Results are rounded in a separate loop: in the same loop as the
/// computation, silu took a quarter longer.
template <class Out, int Inputs, int Outputs>
bool widens_in_registers(const Elementwise<Inputs, Outputs>& arguments) {
  bool found = std::is_same_v<Out, BFloat16> && arguments.layout.rank > 0;
  for (int k = 0; k < Inputs; ++k)
    found = found && arguments.in_dtype[k] == Dtype::bfloat16 && arguments.layout.stride[k][0] == 1;
  return found;
}

template <class Out, class Functor, int Inputs, int Outputs>
Status elementwise(const Functor& functor, const Elementwise<Inputs, Outputs>& arguments,
                   int64_t begin, int64_t end) {
  using C = Compute<Out>;
  const Layout<Inputs, Outputs>& layout = arguments.layout;
  Cursor<Inputs, Outputs> cursor(layout, begin);
  C buffers[Inputs][kRun];
  C results[Outputs][kRun];
  const bool in_registers = widens_in_registers<Out>(arguments);
  const int64_t longest = needs_buffers<C>(arguments) ? kRun : end - begin;
  for (int64_t at = begin; at < end;) {
    const int64_t row_rest = layout.rank == 0 ? 1 : layout.size[0] - cursor.index[0];
    const int64_t count = std::min({end - at, row_rest, longest});
    C* to[Outputs];
    bool direct[Outputs] = {};
    for (int o = 0; o < Outputs; ++o) {
      to[o] = results[o];
      if constexpr (std::is_same_v<Out, C>) {
        direct[o] = layout.out_stride[o][0] == 1 || layout.rank == 0;
        if (direct[o]) to[o] = static_cast<Out*>(arguments.out[o]) + cursor.out_offset[o];
      }
    }
    constexpr auto kInputs = std::make_index_sequence<Inputs>{};
    if constexpr (std::is_same_v<Out, BFloat16>) {
      if (in_registers) {
        const BFloat16* in[Inputs];
        for (int k = 0; k < Inputs; ++k)
          in[k] = static_cast<const BFloat16*>(arguments.in[k]) + cursor.offset[k];
        apply(functor, to, in, count, kInputs);
      }
    }
    if (!in_registers) {
      const C* in[Inputs];
      for (int k = 0; k < Inputs; ++k) {
        in[k] = read_run(buffers[k], arguments.in[k], cursor.offset[k], layout.stride[k][0], count,
                         arguments.in_dtype[k]);
      }
      apply(functor, to, in, count, kInputs);
    }
    for (int o = 0; o < Outputs; ++o) {
      if (direct[o]) continue;
      Out* out = static_cast<Out*>(arguments.out[o]) + cursor.out_offset[o];
      if (layout.out_stride[o][0] == 1 || layout.rank == 0) {
        narrow_run(out, results[o], count);
      } else {
        scatter_run(out, layout.out_stride[o][0], results[o], count);
      }
    }
    cursor.advance(layout, count);
    at += count;
  }
  return {};
}

/// Computes outputs = Functor<Activation, ExactMath>(inputs...) for one of the activations of a
/// list.
template <class Out, template <class, class> class Functor, int Inputs, int Outputs, class List>
Status elementwise_activated(Activation activation, const Elementwise<Inputs, Outputs>& arguments,
                             int64_t begin, int64_t end, List list) {
  Status status{"this activation has no kernel"};
  with_activation(
      activation,
      [&](auto tag) {
        using Act = typename decltype(tag)::type;
        status = elementwise<Out>(Functor<Act, ExactMath>{}, arguments, begin, end);
      },
      list);
  return status;
}

}  // namespace torchkiln::cpu::TORCHKILN_ISA
