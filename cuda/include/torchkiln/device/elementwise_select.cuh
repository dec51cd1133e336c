#pragma once

// The condition under which each accessor of elementwise_access.cuh supports a problem, and
// functions that make the accessors. launch_bodies() in elementwise.cuh selects an accessor.

#include "torchkiln/device/alignment.h"
#include "torchkiln/device/elementwise_any.cuh"
#include "torchkiln/device/elementwise_elements.cuh"
#include "torchkiln/device/elementwise_transposed.cuh"

namespace torchkiln::device {
namespace elementwise {

template <class In, int Inputs, int Outputs>
bool reads_linearly(const Elementwise<Inputs, Outputs>& arguments, int k) {
  return arguments.in_dtype[k] == DtypeOf<In>::value && arguments.layout.linear(k) &&
         aligned(arguments.in[k]);
}

template <int Inputs, int Outputs>
bool writes_linearly(const Elementwise<Inputs, Outputs>& arguments, int o) {
  return arguments.layout.out_linear(o) && aligned(arguments.out[o]);
}

/// Whether the rows of the iteration space are whole vectors, and their number is below 2^31.
template <int Inputs, int Outputs>
bool has_rows(const Layout<Inputs, Outputs>& layout, int lanes) {
  constexpr int kRank = 3;  // as in RowAccess
  return layout.rank > 0 && layout.rank <= kRank && layout.size[0] % lanes == 0 &&
         layout.numel / lanes < int64_t{1} << 31;
}

/// Whether an operand has whole vectors of `unit` elements along dimension 0 or, for unit 1, is
/// constant along dimension 0; and whether its offsets, in units, fit in 32 bits.
template <int Inputs, int Outputs>
bool fits_rows(const Layout<Inputs, Outputs>& layout, const int64_t (&strides)[kMaxRank],
               const void* data, int unit) {
  if (unit > 1 && (strides[0] != 1 || !rows_in_vectors(data, unit, {strides[1], strides[2]})))
    return false;
  int64_t reach = layout.size[0] / unit;
  for (int d = 1; d < layout.rank; ++d) reach += (layout.size[d] - 1) * (strides[d] / unit);
  return reach < int64_t{1} << 32;
}

/// Whether 32 bits hold all offsets of an operand.
template <class Layout>
bool fits_elements(const Layout& layout, const int64_t (&strides)[kMaxRank]) {
  int64_t reach = 0;
  for (int d = 0; d < layout.rank; ++d) reach += (layout.size[d] - 1) * strides[d];
  return reach < int64_t{1} << 32;
}

/// Makes the accessors of a problem. Vector access needs inputs of exactly the types In.
template <class Out, class... In>
struct Accessors {
  static constexpr int kInputs = sizeof...(In);
  static constexpr auto kEach = std::make_index_sequence<sizeof...(In)>{};

  template <int Outputs>
  static bool all_linear(const Elementwise<kInputs, Outputs>& arguments) {
    for (int o = 0; o < Outputs; ++o)
      if (!writes_linearly(arguments, o)) return false;
    return all_inputs_linear(arguments, kEach);
  }

  template <int Outputs>
  static bool all_rows(const Elementwise<kInputs, Outputs>& arguments, int lanes) {
    const auto& layout = arguments.layout;
    if (!has_rows(layout, lanes)) return false;
    for (int o = 0; o < Outputs; ++o)
      if (!fits_rows(layout, layout.out_stride[o], arguments.out[o], lanes)) return false;
    return all_inputs_rows(arguments, lanes, kEach);
  }

  /// Whether input k is constant along dimension 0.
  template <class Layout>
  static bool is_repeated(const Layout& layout, int k) {
    return layout.stride[k][0] == 0;
  }

  template <int Outputs>
  static LinearAccess<Out, Outputs, In...> linear(const Elementwise<kInputs, Outputs>& arguments) {
    LinearAccess<Out, Outputs, In...> access;
    for (int o = 0; o < Outputs; ++o) access.outputs[o] = static_cast<Out*>(arguments.out[o]);
    for (int k = 0; k < kInputs; ++k) access.inputs[k] = arguments.in[k];
    return access;
  }

  template <bool FirstIsLinear, int Outputs>
  static RowAccess<FirstIsLinear, Out, Outputs, In...> rows(
      const Elementwise<kInputs, Outputs>& arguments, int lanes) {
    const auto& layout = arguments.layout;
    RowAccess<FirstIsLinear, Out, Outputs, In...> access{};
    access.size[0] = Divisor(static_cast<uint32_t>(layout.size[0] / lanes));
    if (layout.rank > 1) access.size[1] = Divisor(static_cast<uint32_t>(layout.size[1]));
    const auto in_units = [&](uint32_t (&to)[3], const int64_t (&strides)[kMaxRank], int unit) {
      to[0] = static_cast<uint32_t>(strides[0]);
      for (int d = 1; d < layout.rank; ++d) to[d] = static_cast<uint32_t>(strides[d] / unit);
    };
    for (int o = 0; o < Outputs; ++o) {
      access.outputs[o] = static_cast<Out*>(arguments.out[o]);
      in_units(access.out_stride[o], layout.out_stride[o], lanes);
    }
    for (int k = 0; k < kInputs; ++k) {
      access.inputs[k] = arguments.in[k];
      access.repeated[k] = is_repeated(layout, k);
      in_units(access.stride[k], layout.stride[k], access.repeated[k] ? 1 : lanes);
    }
    return access;
  }

  /// Whether some input is contiguous along dimension 1 while the output is contiguous along
  /// dimension 0, and both dimensions are large enough for squares. `whole_bytes`: threads share
  /// bytes of a mask, so eight elements along dimension 0 must be one byte.
  template <int Outputs>
  static bool is_transposed(const Elementwise<kInputs, Outputs>& arguments, bool whole_bytes) {
    const auto& layout = arguments.layout;
    if (layout.rank < 2 || layout.rank > 3 || layout.numel >= int64_t{1} << 40) return false;
    if (layout.size[0] < 16 || layout.size[1] < 16) return false;
    if (layout.size[0] >= int64_t{1} << 31 || layout.size[1] >= int64_t{1} << 31) return false;
    if (squares(layout) >= int64_t{1} << 31) return false;
    if (whole_bytes && layout.size[0] % 8 != 0) return false;
    bool any = false;
    for (int k = 0; k < kInputs; ++k) any = any || runs_along_1(layout, k);
    return any && all_types_match(arguments, kEach);
  }

  template <int Outputs>
  static TransposedAccess<Out, Outputs, In...> transposed(
      const Elementwise<kInputs, Outputs>& arguments) {
    const auto& layout = arguments.layout;
    TransposedAccess<Out, Outputs, In...> access{};
    for (int o = 0; o < Outputs; ++o) {
      access.outputs[o] = static_cast<Out*>(arguments.out[o]);
      for (int d = 0; d < layout.rank; ++d) access.out_stride[o][d] = layout.out_stride[o][d];
    }
    for (int k = 0; k < kInputs; ++k) {
      access.inputs[k] = arguments.in[k];
      access.transposed[k] = runs_along_1(layout, k);
      for (int d = 0; d < layout.rank; ++d) access.stride[k][d] = layout.stride[k][d];
    }
    for (int d = 0; d < 2; ++d) access.size[d] = static_cast<uint32_t>(layout.size[d]);
    access.across = Divisor(static_cast<uint32_t>(ceil_div(layout.size[0], access.kSide)));
    access.down = Divisor(static_cast<uint32_t>(ceil_div(layout.size[1], access.kSide)));
    access.count = squares(layout);
    return access;
  }

  /// Whether ElementAccess supports the problem.
  template <int Outputs>
  static bool all_elements(const Elementwise<kInputs, Outputs>& arguments) {
    const auto& layout = arguments.layout;
    if (layout.rank > 2 || layout.numel >= int64_t{1} << 31) return false;
    for (int o = 0; o < Outputs; ++o)
      if (!fits_elements(layout, layout.out_stride[o])) return false;
    for (int k = 0; k < kInputs; ++k)
      if (!fits_elements(layout, layout.stride[k])) return false;
    return all_types_match(arguments, kEach);
  }

  template <int Outputs>
  static ElementAccess<Out, Outputs, In...> elements(
      const Elementwise<kInputs, Outputs>& arguments) {
    using Access = ElementAccess<Out, Outputs, In...>;
    const auto& layout = arguments.layout;
    const auto steps = [&](const int64_t (&strides)[kMaxRank]) -> typename Access::Steps {
      return {static_cast<uint32_t>(strides[0]),
              static_cast<uint32_t>(strides[1] - layout.size[0] * strides[0])};
    };
    Access access{};
    access.size = Divisor(static_cast<uint32_t>(layout.size[0]));
    for (int o = 0; o < Outputs; ++o) {
      access.outputs[o] = static_cast<Out*>(arguments.out[o]);
      access.out[o] = steps(layout.out_stride[o]);
    }
    for (int k = 0; k < kInputs; ++k) {
      access.inputs[k] = arguments.in[k];
      access.in[k] = steps(layout.stride[k]);
    }
    return access;
  }

  template <int Outputs>
  static AnyAccess<Out, Outputs, kInputs> any(const Elementwise<kInputs, Outputs>& arguments) {
    const auto& layout = arguments.layout;
    AnyAccess<Out, Outputs, kInputs> access{arguments, layout.numel < int64_t{1} << 31, {}};
    for (int d = 0; access.narrow && d < layout.rank; ++d)
      access.size[d] = Divisor(static_cast<uint32_t>(layout.size[d]));
    return access;
  }

 private:
  template <class Layout>
  static int64_t squares(const Layout& layout) {
    constexpr int kSide = TransposedAccess<Out, 1, In...>::kSide;
    return ceil_div(layout.size[0], kSide) * ceil_div(layout.size[1], kSide) *
           (layout.rank == 3 ? layout.size[2] : 1);
  }

  template <class Layout>
  static bool runs_along_1(const Layout& layout, int k) {
    return layout.stride[k][1] == 1 && layout.stride[k][0] != 0 && layout.stride[k][0] != 1;
  }

  template <int Outputs, size_t... K>
  static bool all_types_match(const Elementwise<kInputs, Outputs>& arguments,
                              std::index_sequence<K...>) {
    return ((arguments.in_dtype[K] == DtypeOf<In>::value) && ...);
  }

  template <int Outputs, size_t... K>
  static bool all_inputs_linear(const Elementwise<kInputs, Outputs>& arguments,
                                std::index_sequence<K...>) {
    return (reads_linearly<In>(arguments, K) && ...);
  }

  template <int Outputs, size_t... K>
  static bool all_inputs_rows(const Elementwise<kInputs, Outputs>& arguments, int lanes,
                              std::index_sequence<K...>) {
    return ((arguments.in_dtype[K] == DtypeOf<In>::value &&
             fits_rows(arguments.layout, arguments.layout.stride[K], arguments.in[K],
                       is_repeated(arguments.layout, K) ? 1 : lanes)) &&
            ...);
  }
};

}  // namespace elementwise
}  // namespace torchkiln::device
