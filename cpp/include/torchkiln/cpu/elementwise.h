#pragma once

// The CPU counterpart of cuda/include/torchkiln/device/elementwise.cuh: outputs =
// functor(inputs...) for a range of the iteration space. The range is split into runs: a part of an
// innermost row, or several rows if they are short. A run stays in the L1 cache while it is
// converted, computed and converted back.

#include <algorithm>
#include <utility>

#include "torchkiln/core/functors.h"
#include "torchkiln/core/layout.h"
#include "torchkiln/cpu/half.h"

namespace torchkiln::cpu::TORCHKILN_ISA {

// Maximum number of elements per run.
inline constexpr int64_t kRun = 512;

// Elements of float16 that are computed together: a register of float.
#ifdef __AVX512F__
inline constexpr int64_t kHalves = 16;
#else
inline constexpr int64_t kHalves = 8;
#endif

// Rows of at most this many elements are computed together.
inline constexpr int64_t kShortRow = kRun / 4;

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

  /// Advances by `count` elements, at most to the end of the last row of dimension 1.
  void advance(const Layout<Inputs, Outputs>& layout, int64_t count) {
    index[0] += count;
    move(layout, 0, count);
    for (int d = 0; d + 1 < layout.rank && index[d] >= layout.size[d]; ++d) {
      const int64_t rows = d == 0 ? index[0] / layout.size[0] : 1;
      index[d] -= rows * layout.size[d];
      index[d + 1] += rows;
      move(layout, d, -rows * layout.size[d]);
      move(layout, d + 1, rows);
    }
  }

  /// The number of elements of the run that begins here, at most `most`. A run of short rows ends
  /// with a row.
  int64_t run_length(const Layout<Inputs, Outputs>& layout, int64_t most, int64_t longest) const {
    if (layout.rank == 0) return 1;
    int64_t rows = 1;
    if (has_short_rows(layout)) rows = std::min(kRun / layout.size[0], layout.size[1] - index[1]);
    return std::min({most, longest, rows * layout.size[0] - index[0]});
  }

  static bool has_short_rows(const Layout<Inputs, Outputs>& layout) {
    return layout.rank > 1 && layout.size[0] <= kShortRow;
  }

  /// The rows of an operand with these strides, from here on.
  SpacedRows rows(const Layout<Inputs, Outputs>& layout, const int64_t* stride) const {
    if (layout.rank == 0) return {0, 1, 1, 1};
    return {index[0], layout.size[0], stride[0], layout.rank > 1 ? stride[1] : 0};
  }

 private:
  void move(const Layout<Inputs, Outputs>& layout, int d, int64_t count) {
    for (int k = 0; k < Inputs; ++k) offset[k] += count * layout.stride[k][d];
    for (int o = 0; o < Outputs; ++o) out_offset[o] += count * layout.out_stride[o][d];
  }
};

/// An input in the compute type, run by run.
template <class C>
class InputRun {
 public:
  const C* read(const void* from, int64_t offset, const SpacedRows& rows, int64_t count,
                Dtype dtype) {
    // Rows that are the same one, such as those of a bias, stay in the buffer.
    const bool repeats = rows.row_stride == 0 && rows.first == 0 && !rows.is_run(count);
    if (repeats && offset == held_ && count <= held_count_) return buffer_;
    held_ = offset;
    held_count_ = repeats ? count : 0;
    return read_rows<kRun>(buffer_, from, offset, rows, count, dtype);
  }

 private:
  C buffer_[kRun];
  int64_t held_ = 0;
  int64_t held_count_ = 0;  // elements in the buffer that the next run may use
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

/// Stores a run of results, rounded.
template <class Out, class C>
void store_rows(Out* to, const SpacedRows& rows, const C* results, int64_t count) {
  if (rows.is_run(count)) {
    rows.stride == 1 ? narrow_run(to, results, count)
                     : scatter_run(to, rows.stride, results, count);
    return;
  }
  Out* row = to - rows.first * rows.stride;
  for (int64_t column = rows.first; count > 0; column = 0, row += rows.row_stride) {
    const int64_t part = std::min(rows.width - column, count);
    scatter_run(row + column * rows.stride, rows.stride, results, part);
    results += part;
    count -= part;
  }
}

/// Whether all inputs of an op with a float16 result are float16, dimension 0 of all operands has
/// no gaps, and rows are not short. Then a loop converts, computes and rounds a register at a time.
template <int Inputs>
bool has_float16_runs(const Elementwise<Inputs, 1>& arguments) {
  if (arguments.layout.rank == 0) return false;
  bool found = !Cursor<Inputs, 1>::has_short_rows(arguments.layout) &&
               arguments.layout.out_stride[0][0] == 1;
  for (int k = 0; k < Inputs; ++k)
    found = found && arguments.in_dtype[k] == Dtype::float16 && arguments.layout.stride[k][0] == 1;
  return found;
}

/// Whether float16 is computed a register at a time; false for functors that g++ does not vectorise
/// then.
template <class Functor>
inline constexpr bool kInRegisters = true;

/// Computes `count` elements, at most a register, of float16 operands.
template <class Functor, int Inputs, size_t... K>
void apply_float16(const Functor& functor, Half* out, const Half* const (&in)[Inputs], int64_t at,
                   int64_t count, std::index_sequence<K...>) {
  float values[Inputs][kHalves], results[kHalves];
  (widen_run(values[K], in[K] + at, /*stride=*/1, count), ...);
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) results[i] = functor(values[K][i]...);
  narrow_run(out + at, results, count);
}

/// elementwise() of operands for which has_float16_runs() is true.
template <class Functor, int Inputs>
void elementwise_float16(const Functor& functor, const Elementwise<Inputs, 1>& arguments,
                         int64_t begin, int64_t end) {
  constexpr auto kInputs = std::make_index_sequence<Inputs>{};
  Cursor<Inputs, 1> cursor(arguments.layout, begin);
  for (int64_t at = begin; at < end;) {
    const int64_t count = cursor.run_length(arguments.layout, end - at, end - at);
    Half* const out = static_cast<Half*>(arguments.out[0]) + cursor.out_offset[0];
    const Half* in[Inputs];
    for (int k = 0; k < Inputs; ++k)
      in[k] = static_cast<const Half*>(arguments.in[k]) + cursor.offset[k];
    int64_t i = 0;
    for (; i + kHalves <= count; i += kHalves) apply_float16(functor, out, in, i, kHalves, kInputs);
    if (i < count) apply_float16(functor, out, in, i, count - i, kInputs);
    cursor.advance(arguments.layout, count);
    at += count;
  }
}

template <class Out, class Functor, int Inputs, int Outputs>
Status elementwise(const Functor& functor, const Elementwise<Inputs, Outputs>& arguments,
                   int64_t begin, int64_t end) {
  using C = Compute<Out>;
  if constexpr (std::is_same_v<Out, Half> && Outputs == 1 && kInRegisters<Functor>) {
    if (has_float16_runs(arguments)) {
      elementwise_float16(functor, arguments, begin, end);
      return {};
    }
  }
  const Layout<Inputs, Outputs>& layout = arguments.layout;
  Cursor<Inputs, Outputs> cursor(layout, begin);
  InputRun<C> inputs[Inputs];
  C results[Outputs][kRun];
  const bool in_registers = widens_in_registers<Out>(arguments) && !cursor.has_short_rows(layout);
  const int64_t longest = needs_buffers<C>(arguments) ? kRun : end - begin;
  for (int64_t at = begin; at < end;) {
    const int64_t count = cursor.run_length(layout, end - at, longest);
    C* to[Outputs];
    bool direct[Outputs] = {};
    for (int o = 0; o < Outputs; ++o) {
      to[o] = results[o];
      if constexpr (std::is_same_v<Out, C>) {
        const SpacedRows rows = cursor.rows(layout, layout.out_stride[o]);
        direct[o] = rows.stride == 1 && rows.is_run(count);
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
      for (int k = 0; k < Inputs; ++k)
        in[k] = inputs[k].read(arguments.in[k], cursor.offset[k],
                               cursor.rows(layout, layout.stride[k]), count, arguments.in_dtype[k]);
      apply(functor, to, in, count, kInputs);
    }
    for (int o = 0; o < Outputs; ++o) {
      if (!direct[o])
        store_rows(static_cast<Out*>(arguments.out[o]) + cursor.out_offset[o],
                   cursor.rows(layout, layout.out_stride[o]), results[o], count);
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
