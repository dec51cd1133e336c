#pragma once

// The one skeleton of all elementwise kernels: out[i] = functor(in_0[...], in_1[...], ...), with a
// dense output and inputs anywhere; elementwise_access.cuh says how they are reached.
//
// A thread owns one or two output vectors of 16 bytes, all of which are loaded before the first is
// used. More of them measured slower: their registers cost threads, and threads are what keeps
// bytes on the way.

#include <type_traits>
#include <utility>

#include "torchkiln/elementwise_access.cuh"

namespace torchkiln {
namespace elementwise {

/// Both settings give a block 256 vectors, so that a tensor of some megabytes is one wave of
/// blocks. With two-byte elements, whose eight lanes take more arithmetic, a thread has enough to
/// do with one.
template <class Out>
inline constexpr int kUnroll = kVectorLanes<Out> > 4 ? 1 : 2;
template <class Out>
inline constexpr int kThreads = 256 / kUnroll<Out>;
template <class Out>
inline constexpr int64_t kBlockElements = int64_t{256} * kVectorLanes<Out>;

template <class Functor, class Packet, size_t... K>
__device__ __forceinline__ auto apply(const Functor& functor, const Packet& packet, int lane,
                                      std::index_sequence<K...>) {
  return functor(packet.template get<K>(lane)...);
}

template <bool Full, class Functor, class Out, class Access>
__device__ __forceinline__ void run(const Functor& functor, Out* out, const Access& access,
                                    int64_t numel) {
  using C = Compute<Out>;
  constexpr int kLanes = kVectorLanes<Out>;
  constexpr int kStep = kThreads<Out> * kLanes;
  const int64_t first = blockIdx.x * kBlockElements<Out> + threadIdx.x * kLanes;
  typename Access::template Packet<C, kLanes> packets[kUnroll<Out>];
#pragma unroll
  for (int u = 0; u < kUnroll<Out>; ++u) {
    const int64_t at = first + u * kStep;
    if (Full || at < numel) access.template load<Full>(packets[u], at, numel);
  }
#pragma unroll
  for (int u = 0; u < kUnroll<Out>; ++u) {
    const int64_t at = first + u * kStep;
    C result[kLanes];
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      result[i] = apply(functor, packets[u], i, std::make_index_sequence<Access::kArity>{});
    }
    if (Full || at + kLanes <= numel) {
      store(out + at, result);
    } else {
#pragma unroll
      for (int i = 0; i < kLanes; ++i) {
        if (at + i < numel) out[at + i] = convert<Out>(result[i]);
      }
    }
  }
}

template <class Functor, class Out, class Access>
__global__ void __launch_bounds__(kThreads<Out>)
    kernel(Functor functor, Out* out, const __grid_constant__ Access access, int64_t numel) {
  wait_for_previous_kernel();
  if ((int64_t{blockIdx.x} + 1) * kBlockElements<Out> <= numel) {
    run<true>(functor, out, access, numel);
  } else {
    run<false>(functor, out, access, numel);
  }
}

/// out = functor(inputs...), with the fast kernels for inputs of exactly the types In.
template <class Out, class... In, class Functor>
Status launch(const Functor& functor, const Elementwise<sizeof...(In)>& arguments,
              cudaStream_t stream) {
  constexpr int kLanes = kVectorLanes<Out>;
  constexpr auto kEach = std::make_index_sequence<sizeof...(In)>{};
  const int64_t numel = arguments.layout.numel;
  if (numel == 0) return {};
  const auto start = [&](const auto& access) -> Status {
    const int64_t blocks = ceil_div(numel, kBlockElements<Out>);
    if (blocks > kMaxGridX) return {"too many elements for one launch"};
    using Access = std::decay_t<decltype(access)>;
    return launch_overlapped(kernel<Functor, Out, Access>, dim3(static_cast<unsigned>(blocks)),
                             kThreads<Out>, stream, functor, static_cast<Out*>(arguments.out),
                             access, numel);
  };
  if (all_linear<In...>(arguments, kEach)) return start(linear_access<In...>(arguments));
  if (all_rows<In...>(arguments, kLanes, kEach)) {
    return arguments.layout.linear(0) ? start(row_access<true, In...>(arguments, kLanes))
                                      : start(row_access<false, In...>(arguments, kLanes));
  }
  return start(any_access(arguments));
}

}  // namespace elementwise
}  // namespace torchkiln
