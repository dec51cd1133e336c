#pragma once

// Skeleton of all elementwise kernels: out_0[...], out_1[...] = body(in_0[...], in_1[...], ...),
// for operands of any layout; elementwise_access.cuh has the accessors.
//
// A thread owns one or two 16-byte vectors, or a few single elements where vectors do not fit, and
// issues all loads before it uses the first. More vectors per thread measured slower: their
// registers lower the occupancy, and with it the bytes in flight.
//
// A body computes one vector: body.run<Full>(packet, at, numel, results) computes the elements from
// index `at` on; all threads of a warp call it together. Each<Functor> turns a scalar functor into
// a body.

#include <type_traits>
#include <utility>

#include "torchkiln/core/functors.h"
#include "torchkiln/device/elementwise_select.cuh"

namespace torchkiln::device {
namespace elementwise {

/// Whether adjacent threads write one byte together. Such a body has a member kSharesBytes.
template <class Body, class = void>
inline constexpr bool kSharesBytes = false;
template <class Body>
inline constexpr bool kSharesBytes<Body, std::void_t<decltype(Body::kSharesBytes)>> =
    Body::kSharesBytes;

template <class C, int N>
__device__ __forceinline__ void assign(C (&results)[1][N], int lane, C value) {
  results[0][lane] = value;
}
template <class C, int N>
__device__ __forceinline__ void assign(C (&results)[2][N], int lane, Pair<C> value) {
  results[0][lane] = value.first;
  results[1][lane] = value.second;
}
template <class C, int N>
__device__ __forceinline__ void assign(C (&results)[3][N], int lane, Triple<C> value) {
  results[0][lane] = value.first;
  results[1][lane] = value.second;
  results[2][lane] = value.third;
}

/// The body of a scalar functor: results[i] = functor(inputs[i]...).
template <class Functor>
struct Each {
  Functor functor;

  template <bool Full, class Packet, class C, int Outputs, int N, size_t... K>
  __device__ __forceinline__ void run(const Packet& packet, int64_t, int64_t,
                                      C (&results)[Outputs][N], std::index_sequence<K...>) const {
#pragma unroll
    for (int i = 0; i < N; ++i) assign(results, i, functor(packet.template get<K>(i)...));
  }
};

/// Makes Functor<Activation, Math> for an activation.
template <template <class, class> class Functor, class Math>
struct Make {
  template <class Activation>
  TORCHKILN_FUNCTION auto operator()(TypeTag<Activation>) const {
    return Functor<Activation, Math>{};
  }
};

/// Makes a functor that holds a scale.
template <template <class, class, class> class Functor, class Math, class C>
struct MakeScaled {
  C scale;

  template <class Activation>
  TORCHKILN_FUNCTION auto operator()(TypeTag<Activation>) const {
    return Functor<Activation, Math, C>{scale};
  }
};

/// One vector of each input, converted to the compute type.
template <class C, int Arity, int N>
struct Computed {
  C values[Arity][N];

  template <size_t K>
  __device__ __forceinline__ C get(int lane) const {
    return values[K][lane];
  }
};

/// A body that selects the activation at run time, once per vector. Rare or slow accesses use it,
/// so that one kernel serves all activations. make(TypeTag<Activation>{}) returns the functor.
template <class Make, class List>
struct Switched {
  Activation activation;
  Make make;

  template <bool Full, class Packet, class C, int Outputs, int N, size_t... K>
  __device__ __forceinline__ void run(const Packet& packet, int64_t at, int64_t numel,
                                      C (&results)[Outputs][N],
                                      std::index_sequence<K...> each) const {
    // The inputs are converted once, before the switch: inside, the code of packet.get() would be
    // repeated per activation.
    Computed<C, sizeof...(K), N> inputs;
#pragma unroll
    for (int i = 0; i < N; ++i) ((inputs.values[K][i] = packet.template get<K>(i)), ...);
    with_activation(
        activation,
        [&](auto tag) {
          Each<decltype(make(tag))>{make(tag)}.template run<Full>(inputs, at, numel, results, each);
        },
        List{});
  }
};

template <bool Full, class Body, class Access>
__device__ __forceinline__ void run(const Body& body, const Access& access, int64_t numel) {
  using C = Compute<typename Access::Out>;
  constexpr int kUnroll = Access::kUnroll;
  __shared__ typename Access::Stage staged;
  const auto place = access.stage(staged, numel);
  typename Access::template Packet<C> packets[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t at = access.begin(u, numel, place);
    if (Full || place.has(u, at, numel))
      access.template load<Full>(packets[u], at, numel, u, place);
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t at = access.begin(u, numel, place);
    C results[Access::kOutputs][Access::kLanes];
    body.template run<Full>(packets[u], at, numel, results,
                            std::make_index_sequence<Access::kArity>{});
    access.template store<Full>(packets[u], results, at, numel, u, place);
  }
}

template <class Body, class Access>
__global__ void __launch_bounds__(Access::kThreads)
    kernel(Body body, const __grid_constant__ Access access, int64_t numel) {
  wait_for_previous_kernel();
  if constexpr (Access::kHasFullBlocks) {
    if ((int64_t{blockIdx.x} + 1) * Access::kBlockElements <= numel)
      return run<true>(body, access, numel);
  }
  run<false>(body, access, numel);
}

/// Launches `body`. For AnyAccess, and for rows in vectors whose first input is not linear,
/// launches `general` instead, which computes the same function. All accessors except AnyAccess
/// need inputs of exactly the types In.
template <class Out, class... In, class Body, class General, int Outputs>
Status launch_bodies(const Body& body, const General& general,
                     const Elementwise<sizeof...(In), Outputs>& arguments, cudaStream_t stream) {
  using Accessors = elementwise::Accessors<Out, In...>;
  constexpr int kLanes = kVectorLanes<Out>;
  const int64_t numel = arguments.layout.numel;
  if (numel == 0) return {};
  const auto launch_with = [&](const auto& chosen, const auto& access) -> Status {
    using Chosen = std::decay_t<decltype(chosen)>;
    using Access = std::decay_t<decltype(access)>;
    const int64_t blocks = access.blocks(numel);
    if (blocks > kMaxGridX) return {"too many elements for one launch"};
    const Grid grid{dim3(static_cast<unsigned>(blocks)), Access::kThreads};
    return launch_overlapped(kernel<Chosen, Access>, grid, stream, chosen, access, numel);
  };
  if (Accessors::all_linear(arguments)) return launch_with(body, Accessors::linear(arguments));
  if (!Accessors::all_rows(arguments, kLanes)) {
    if (Accessors::is_transposed(arguments, kSharesBytes<General>))
      return launch_with(body, Accessors::transposed(arguments));
    if constexpr (sizeof(Out) < 8) {
      if (Accessors::all_elements(arguments))
        return launch_with(body, Accessors::elements(arguments));
    }
    return launch_with(general, Accessors::any(arguments));
  }
  bool first_is_linear = sizeof...(In) > 1 && arguments.layout.linear(0);
  for (int o = 0; o < Outputs; ++o)
    first_is_linear = first_is_linear && arguments.layout.out_linear(o);
  for (size_t k = 1; k < sizeof...(In); ++k)
    first_is_linear = first_is_linear && !Accessors::is_repeated(arguments.layout, k);
  if constexpr (sizeof...(In) > 1) {
    if (first_is_linear)
      return launch_with(body, Accessors::template rows<true>(arguments, kLanes));
  }
  return launch_with(general, Accessors::template rows<false>(arguments, kLanes));
}

/// Launches outputs = functor(inputs...).
template <class Out, class... In, class Functor, int Outputs>
Status launch(const Functor& functor, const Elementwise<sizeof...(In), Outputs>& arguments,
              cudaStream_t stream) {
  const Each<Functor> body{functor};
  return launch_bodies<Out, In...>(body, body, arguments, stream);
}

/// Launches outputs = make(activation)(inputs...), for the activations of a list.
template <class Out, class... In, class Make, int Outputs, class List = Activations>
Status launch_activated(Activation activation, const Make& make,
                        const Elementwise<sizeof...(In), Outputs>& arguments, cudaStream_t stream,
                        List list = {}) {
  const Switched<Make, List> general{activation, make};
  // For float64, one kernel serves all activations, because their code is long.
  if constexpr (sizeof(Out) == 8) {
    return launch_bodies<Out, In...>(general, general, arguments, stream);
  } else {
    Status status{"this activation has no kernel"};
    with_activation(
        activation,
        [&](auto tag) {
          const Each<decltype(make(tag))> body{make(tag)};
          status = launch_bodies<Out, In...>(body, general, arguments, stream);
        },
        list);
    return status;
  }
}

}  // namespace elementwise
}  // namespace torchkiln::device
