#pragma once

// How the elementwise kernels reach their inputs, from the narrowest case to the widest:
//
//   LinearAccess  every input lies as the output does: pure streaming, no index arithmetic
//   RowAccess     every input is contiguous along the innermost dimension: one offset a vector
//                 (row-strided tensors, a bias along the last dimension)
//   AnyAccess     every other stride, alignment and mix of dtypes
//
// An accessor is a kernel parameter. load<Full>(packet, at, numel) reads what belongs to the output
// elements from `at` on, a whole vector of them when Full; packet.get<K>(lane) is the value of
// input K.

#include <cuda/std/tuple>
#include <utility>

#include "torchkiln/divide.cuh"
#include "torchkiln/launch.cuh"
#include "torchkiln/layout.h"
#include "torchkiln/vec.cuh"

namespace torchkiln {
namespace elementwise {

/// What one thread has loaded: N elements of each input, as they lie in memory and are widened at
/// their use.
template <class C, int N, class... In>
struct Packet {
  ::cuda::std::tuple<Vec<In, N>...> vectors;

  template <size_t K>
  __device__ __forceinline__ C get(int lane) const {
    return convert<C>(::cuda::std::get<K>(vectors).lane[lane]);
  }
};

template <class... In>
struct LinearAccess {
  static constexpr int kArity = sizeof...(In);
  template <class C, int N>
  using Packet = elementwise::Packet<C, N, In...>;

  const void* inputs[kArity];

  template <bool Full, class C, int N>
  __device__ __forceinline__ void load(elementwise::Packet<C, N, In...>& packet, int64_t at,
                                       int64_t numel) const {
    load_each<Full>(packet, at, numel, std::make_index_sequence<kArity>{});
  }

  template <bool Full, class C, int N, size_t... K>
  __device__ __forceinline__ void load_each(elementwise::Packet<C, N, In...>& packet, int64_t at,
                                            int64_t numel, std::index_sequence<K...>) const {
    if (Full || at + N <= numel) {
      ((::cuda::std::get<K>(packet.vectors) =
            load_vector<N>(static_cast<const In*>(inputs[K]) + at)),
       ...);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (at + i >= numel) break;
        ((::cuda::std::get<K>(packet.vectors).lane[i] = static_cast<const In*>(inputs[K])[at + i]),
         ...);
      }
    }
  }
};

/// Up to three dimensions, counted in whole output vectors: the innermost size and all strides are
/// multiples of one, so that 32 bits reach far and no vector is cut. A first input that lies as the
/// output does (an activation beside its bias) is loaded before any index is computed. The code is
/// straight, since small tensors wait for every instruction.
template <bool FirstIsLinear, class... In>
struct RowAccess {
  static constexpr int kArity = sizeof...(In);
  static constexpr int kRank = 3;
  template <class C, int N>
  using Packet = elementwise::Packet<C, N, In...>;

  const void* inputs[kArity];
  Divisor size[kRank - 1];
  uint32_t stride[kArity][kRank];

  template <bool Full, class C, int N>
  __device__ __forceinline__ void load(elementwise::Packet<C, N, In...>& packet, int64_t at,
                                       int64_t) const {
    load_each(packet, at, std::make_index_sequence<kArity>{});
  }

  template <class C, int N, size_t... K>
  __device__ __forceinline__ void load_each(elementwise::Packet<C, N, In...>& packet, int64_t at,
                                            std::index_sequence<K...>) const {
    ((::cuda::std::get<K>(packet.vectors) =
          load_vector<N>(static_cast<const In*>(inputs[K]) + offset<K>(at, N))),
     ...);
  }

  template <size_t K>
  __device__ __forceinline__ int64_t offset(int64_t at, int lanes) const {
    if constexpr (FirstIsLinear && K == 0) return at;
    const uint32_t vector = static_cast<uint32_t>(at / lanes);
    const uint32_t row = size[0].quotient(vector);
    const uint32_t slab = size[1].quotient(row);
    const uint32_t place[kRank] = {vector - row * size[0].divisor(), row - slab * size[1].divisor(),
                                   slab};
    uint32_t offset = 0;
#pragma unroll
    for (int d = 0; d < kRank; ++d) offset += place[d] * stride[K][d];
    return static_cast<int64_t>(offset) * lanes;
  }
};

template <class C, int N, int Arity>
struct WidePacket {
  C value[Arity][N];

  template <size_t K>
  __device__ __forceinline__ C get(int lane) const {
    return value[K][lane];
  }
};

/// Calls body(const T*) with the type that `dtype` names.
template <class Body>
__device__ __forceinline__ void with_type(const void* data, Dtype dtype, const Body& body) {
  switch (dtype) {
    case Dtype::float32:
      return body(static_cast<const float*>(data));
    case Dtype::float64:
      return body(static_cast<const double*>(data));
    case Dtype::float16:
      return body(static_cast<const __half*>(data));
    default:
      return body(static_cast<const __nv_bfloat16*>(data));
  }
}

template <int Arity>
struct AnyAccess {
  static constexpr int kArity = Arity;
  template <class C, int N>
  using Packet = WidePacket<C, N, Arity>;

  Elementwise<Arity> arguments;
  bool narrow;             // fewer than 2^31 elements: indices are divided by
  Divisor size[kMaxRank];  // these, since a 64-bit division costs a hundred instructions
  bool linear[Arity];      // lies as the output does, and is aligned

  template <bool Full, class C, int N>
  __device__ __forceinline__ void load(WidePacket<C, N, Arity>& packet, int64_t at,
                                       int64_t numel) const {
#pragma unroll
    for (int k = 0; k < Arity; ++k) {
      with_type(arguments.in[k], arguments.in_dtype[k], [&](auto* data) {
        if (linear[k] && (Full || at + N <= numel)) {
          const auto vector = load_vector<N>(data + at);
#pragma unroll
          for (int i = 0; i < N; ++i) packet.value[k][i] = convert<C>(vector.lane[i]);
        } else {
          walk<Full>(packet.value[k], data, k, at, numel);
        }
      });
    }
  }

  template <bool Full, class C, int N, class T>
  __device__ __forceinline__ void walk(C (&values)[N], const T* data, int k, int64_t at,
                                       int64_t numel) const {
    const Layout<Arity>& layout = arguments.layout;
    const int64_t step = layout.stride[k][0];
    Position position = locate(k, at);
    if (position.place0 + N <= layout.size[0]) {
#pragma unroll
      for (int i = 0; i < N; ++i) values[i] = convert<C>(data[position.offset + i * step]);
      return;
    }
    // A row ends within the vector. An index is divided anew only where a second dimension ends
    // with it.
    const int64_t row_step = layout.stride[k][1] - layout.size[0] * step;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (!Full && at + i >= numel) break;
      values[i] = convert<C>(data[position.offset]);
      position.offset += step;
      if (++position.place0 == layout.size[0]) {
        position.place0 = 0;
        position.offset += row_step;
        if (++position.place1 == layout.size[1]) position = locate_again(k, at + i + 1);
      }
    }
  }

  struct Position {
    int64_t offset;
    int64_t place0;  // along dimension 0
    int64_t place1;  // along dimension 1
  };

  // Not inlined: it would be repeated for every lane.
  __device__ __noinline__ Position locate_again(int k, uint64_t at) const { return locate(k, at); }

  __device__ __forceinline__ Position locate(int k, uint64_t at) const {
    const Layout<Arity>& layout = arguments.layout;
    Position position{};
#pragma unroll 1
    for (int d = 0; d < layout.rank; ++d) {
      uint64_t rest = 0;
      if (d + 1 < layout.rank)
        rest = narrow ? size[d].quotient(static_cast<uint32_t>(at)) : at / layout.size[d];
      const int64_t place = static_cast<int64_t>(at - rest * layout.size[d]);
      if (d == 0) position.place0 = place;
      if (d == 1) position.place1 = place;
      position.offset += place * layout.stride[k][d];
      at = rest;
    }
    return position;
  }
};

template <class In, int Arity>
bool reads_linearly(const Elementwise<Arity>& arguments, int k) {
  return arguments.in_dtype[k] == DtypeOf<In>::value && arguments.layout.linear(k) &&
         aligned(arguments.in[k], kVectorBytes);
}

/// Whether input k can be read by whole vectors of so many elements along dimension 0, counted in
/// 32 bits.
template <class In, int Arity>
bool reads_rows(const Elementwise<Arity>& arguments, int k, int lanes) {
  const Layout<Arity>& layout = arguments.layout;
  if (arguments.in_dtype[k] != DtypeOf<In>::value || !aligned(arguments.in[k], kVectorBytes))
    return false;
  if (layout.rank == 0 || layout.size[0] % lanes != 0 || layout.stride[k][0] != 1) return false;
  int64_t reach = layout.size[0] / lanes;
  for (int d = 1; d < layout.rank; ++d) {
    if (d >= RowAccess<false, In>::kRank || layout.stride[k][d] % lanes != 0) return false;
    reach += (layout.size[d] - 1) * (layout.stride[k][d] / lanes);
  }
  return reach < int64_t{1} << 32 && layout.numel / lanes < int64_t{1} << 31;
}

template <class... In, size_t... K>
bool all_linear(const Elementwise<sizeof...(In)>& arguments, std::index_sequence<K...>) {
  return (reads_linearly<In>(arguments, K) && ...);
}

template <class... In, size_t... K>
bool all_rows(const Elementwise<sizeof...(In)>& arguments, int lanes, std::index_sequence<K...>) {
  return (reads_rows<In>(arguments, K, lanes) && ...);
}

template <class... In>
LinearAccess<In...> linear_access(const Elementwise<sizeof...(In)>& arguments) {
  LinearAccess<In...> access;
  for (size_t k = 0; k < sizeof...(In); ++k) access.inputs[k] = arguments.in[k];
  return access;
}

template <bool FirstIsLinear, class... In>
RowAccess<FirstIsLinear, In...> row_access(const Elementwise<sizeof...(In)>& arguments, int lanes) {
  const auto& layout = arguments.layout;
  RowAccess<FirstIsLinear, In...> access{};
  access.size[0] = Divisor(static_cast<uint32_t>(layout.size[0] / lanes));
  if (layout.rank > 1) access.size[1] = Divisor(static_cast<uint32_t>(layout.size[1]));
  for (size_t k = 0; k < sizeof...(In); ++k) {
    access.inputs[k] = arguments.in[k];
    access.stride[k][0] = 1;
    for (int d = 1; d < layout.rank; ++d)
      access.stride[k][d] = static_cast<uint32_t>(layout.stride[k][d] / lanes);
  }
  return access;
}

template <int Arity>
AnyAccess<Arity> any_access(const Elementwise<Arity>& arguments) {
  const Layout<Arity>& layout = arguments.layout;
  AnyAccess<Arity> access{arguments, layout.numel < int64_t{1} << 31, {}, {}};
  for (int d = 0; access.narrow && d < layout.rank; ++d)
    access.size[d] = Divisor(static_cast<uint32_t>(layout.size[d]));
  for (int k = 0; k < Arity; ++k) {
    access.linear[k] = layout.linear(k) && aligned(arguments.in[k], kVectorBytes);
  }
  return access;
}

}  // namespace elementwise
}  // namespace torchkiln
