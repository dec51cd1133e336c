#pragma once

// Accessor for operands of any alignment with up to two dimensions, such as rows that are not whole
// vectors.

#include "torchkiln/device/elementwise_access.cuh"

namespace torchkiln::device {
namespace elementwise {

/// For up to two dimensions, fewer than 2^31 elements, and inputs of exactly the types In. A thread
/// has single elements, and a warp adjacent elements, as in AnyAccess. One 32-bit division per
/// element locates it in all operands. The offset of element `at` of row `at / size` is
///
///     (at - row * size) * stride[0] + row * stride[1] = at * step + row * gap
///
/// with step = stride[0] and gap = stride[1] - size * stride[0], modulo 2^32.
template <class OutType, int Outputs, class... In>
struct ElementAccess {
  using Out = OutType;
  static constexpr int kArity = sizeof...(In);
  static constexpr int kOutputs = Outputs;
  static constexpr int kLanes = 1;
  static constexpr int kUnroll = 4;
  static constexpr int kThreads = 256;
  static constexpr int64_t kBlockElements = int64_t{kThreads} * kUnroll;
  static constexpr bool kHasFullBlocks = true;
  template <class C>
  using Packet = elementwise::Packet<C, 1, In...>;
  using Stage = NoStage;

  struct Steps {
    uint32_t step;
    uint32_t gap;
  };

  Out* outputs[Outputs];
  const void* inputs[kArity];
  Divisor size;
  Steps in[kArity];
  Steps out[Outputs];

  static int64_t blocks(int64_t numel) { return ceil_div(numel, kBlockElements); }
  __device__ __forceinline__ static Stage stage(Stage&, int64_t) { return {}; }

  __device__ __forceinline__ static int64_t begin(int u, int64_t, const Stage&) {
    return blockIdx.x * kBlockElements + threadIdx.x + u * kThreads;
  }

  __device__ __forceinline__ uint32_t offset(const Steps& steps, int64_t at) const {
    const uint32_t index = static_cast<uint32_t>(at);
    return index * steps.step + size.quotient_above_1(index) * steps.gap;
  }

  template <bool Full, class C>
  __device__ __forceinline__ void load(elementwise::Packet<C, 1, In...>& packet, int64_t at,
                                       int64_t, int, const Stage&) const {
    load_each(packet, at, std::make_index_sequence<kArity>{});
  }
  template <class C, size_t... K>
  __device__ __forceinline__ void load_each(elementwise::Packet<C, 1, In...>& packet, int64_t at,
                                            std::index_sequence<K...>) const {
    ((::cuda::std::get<K>(packet.vectors).lane[0] =
          static_cast<const In*>(inputs[K])[offset(in[K], at)]),
     ...);
  }

  template <bool Full, class C>
  __device__ __forceinline__ void store(const Packet<C>&, const C (&results)[Outputs][1],
                                        int64_t at, int64_t numel, int, const Stage&) const {
    if (!Full && at >= numel) return;
#pragma unroll
    for (int o = 0; o < Outputs; ++o) outputs[o][offset(out[o], at)] = convert<Out>(results[o][0]);
  }
};

}  // namespace elementwise
}  // namespace torchkiln::device
