#pragma once

// Accessor for operands of any strides, alignment and mix of dtypes.

#include "torchkiln/device/elementwise_access.cuh"

namespace torchkiln::device {
namespace elementwise {

/// One element of each input as raw bits, and the offsets of the results.
template <class C, int Outputs, int Arity>
struct AnyPacket {
  uint64_t raw[Arity];
  Dtype dtype[Arity];
  int64_t out_offset[Outputs];

  template <size_t K>
  __device__ __forceinline__ C get(int) const {
    switch (dtype[K]) {
      case Dtype::float32:
        return static_cast<C>(__uint_as_float(static_cast<uint32_t>(raw[K])));
      case Dtype::float64:
        return static_cast<C>(__longlong_as_double(static_cast<long long>(raw[K])));
      case Dtype::float16:
        return convert<C>(__ushort_as_half(static_cast<uint16_t>(raw[K])));
      default:
        return convert<C>(__ushort_as_bfloat16(static_cast<uint16_t>(raw[K])));
    }
  }
};

// Out of line: a 64-bit division takes a hundred instructions, and only tensors of 2^31 or more
// elements need it.
inline __device__ __noinline__ int64_t divide(uint64_t a, uint64_t b) { return a / b; }

/// Access to single elements of any layout. A warp has adjacent elements, so that contiguous
/// operands are still read in full lines. One index computation serves all operands. Elements are
/// converted only after all loads are issued.
template <class OutType, int Outputs, int Arity>
struct AnyAccess {
  using Out = OutType;
  static constexpr int kArity = Arity;
  static constexpr int kOutputs = Outputs;
  static constexpr int kLanes = 1;
  static constexpr int kUnroll = 4;
  static constexpr int kThreads = 256;
  static constexpr int64_t kBlockElements = int64_t{kThreads} * kUnroll;
  static constexpr bool kHasFullBlocks = false;
  template <class C>
  using Packet = AnyPacket<C, Outputs, Arity>;
  using Stage = NoStage;

  Elementwise<Arity, Outputs> arguments;
  bool narrow;  // fewer than 2^31 elements: 32-bit indices, divided by `size`
  Divisor size[kMaxRank];

  static int64_t blocks(int64_t numel) { return ceil_div(numel, kBlockElements); }
  __device__ __forceinline__ static Stage stage(Stage&, int64_t) { return {}; }

  __device__ __forceinline__ static int64_t begin(int u, int64_t, const Stage&) {
    return blockIdx.x * kBlockElements + threadIdx.x + u * kThreads;
  }

  /// Calls body(d, index along dimension d) for element `at`.
  template <class Body>
  __device__ __forceinline__ void locate(int64_t at, const Body& body) const {
    const auto& layout = arguments.layout;
#pragma unroll 1
    for (int d = 0; d < layout.rank; ++d) {
      int64_t index = at;
      if (d + 1 < layout.rank) {
        const int64_t rest =
            narrow ? size[d].quotient(static_cast<uint32_t>(at)) : divide(at, layout.size[d]);
        index = at - rest * layout.size[d];
        at = rest;
      }
      body(d, index);
    }
  }

  __device__ __forceinline__ uint64_t load_raw(int k, int64_t offset) const {
    switch (arguments.in_dtype[k]) {
      case Dtype::float32:
        return static_cast<const uint32_t*>(arguments.in[k])[offset];
      case Dtype::float64:
        return static_cast<const uint64_t*>(arguments.in[k])[offset];
      default:
        return static_cast<const uint16_t*>(arguments.in[k])[offset];
    }
  }

  template <bool Full, class C>
  __device__ __forceinline__ void load(AnyPacket<C, Outputs, Arity>& packet, int64_t at, int64_t,
                                       int, const Stage&) const {
    const auto& layout = arguments.layout;
    int64_t offset[Arity] = {};
#pragma unroll
    for (int o = 0; o < Outputs; ++o) packet.out_offset[o] = 0;
    locate(at, [&](int d, int64_t index) {
#pragma unroll
      for (int k = 0; k < Arity; ++k) offset[k] += index * layout.stride[k][d];
#pragma unroll
      for (int o = 0; o < Outputs; ++o) packet.out_offset[o] += index * layout.out_stride[o][d];
    });
#pragma unroll
    for (int k = 0; k < Arity; ++k) {
      packet.dtype[k] = arguments.in_dtype[k];
      packet.raw[k] = load_raw(k, offset[k]);
    }
  }

  template <bool Full, class C>
  __device__ __forceinline__ void store(const AnyPacket<C, Outputs, Arity>& packet,
                                        const C (&results)[Outputs][1], int64_t at, int64_t numel,
                                        int, const Stage&) const {
    if (!Full && at >= numel) return;
#pragma unroll
    for (int o = 0; o < Outputs; ++o)
      static_cast<Out*>(arguments.out[o])[packet.out_offset[o]] = convert<Out>(results[o][0]);
  }
};

}  // namespace elementwise
}  // namespace torchkiln::device
