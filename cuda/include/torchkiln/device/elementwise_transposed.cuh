#pragma once

// Accessor for problems with an operand that is transposed relative to the output.

#include "torchkiln/device/elementwise_access.cuh"

namespace torchkiln::device {
namespace elementwise {

/// Squares of 32 x 32 elements along dimensions 0 and 1. An input that is contiguous along
/// dimension 1 is read along dimension 1 and transposed in shared memory; every other operand is
/// read along dimension 0. A third dimension, if there is one, counts planes of squares.
///
///      memory                          shared memory                    registers
///   a warp reads 32 elements along  ->  column of a square, rows of  ->  a warp reads a row
///   dimension 1                         33 elements                      of the square
template <class OutType, int Outputs, class... In>
struct TransposedAccess {
  using Out = OutType;
  static constexpr int kArity = sizeof...(In);
  static constexpr int kOutputs = Outputs;
  static constexpr int kRank = 3;
  static constexpr int kLanes = 1;
  static constexpr int kUnroll = 4;
  static constexpr int kThreads = 256;
  static constexpr int kSide = 32;
  static constexpr int64_t kBlockElements = int64_t{kThreads} * kUnroll;
  static constexpr bool kHasFullBlocks = false;
  static_assert(kBlockElements == kSide * kSide);
  template <class C>
  using Packet = elementwise::Packet<C, 1, In...>;
  /// A square of each input. Rows of 33 elements put the elements of a column into different banks.
  struct Stage {
    alignas(8) unsigned char bytes[kArity][kSide * (kSide + 1) * 8];
  };

  Out* outputs[Outputs];
  const void* inputs[kArity];
  bool transposed[kArity];
  int64_t stride[kArity][kRank];
  int64_t out_stride[Outputs][kRank];
  uint32_t size[2];
  Divisor across, down;  // squares along dimensions 0 and 1
  int64_t count;         // squares in all

  int64_t blocks(int64_t) const { return count; }

  /// Element (i0, i1) of the block's square, as indices along the dimensions.
  struct Position {
    uint32_t at[kRank];

    __device__ __forceinline__ int64_t offset(const int64_t (&strides)[kRank]) const {
      return at[0] * strides[0] + at[1] * strides[1] + at[2] * strides[2];
    }
  };
  __device__ __forceinline__ Position locate(int i0, int i1) const {
    const uint32_t row_of_squares = across.quotient(blockIdx.x);
    const uint32_t plane = down.quotient(row_of_squares);
    return {{(blockIdx.x - row_of_squares * across.divisor()) * kSide + i0,
             (row_of_squares - plane * down.divisor()) * kSide + i1, plane}};
  }

  // A thread owns column lane() of the square and rows row() + u * kRowStep. Reading along the
  // other dimension, it owns the transposed elements.
  static constexpr int kRowStep = kThreads / kSide;
  __device__ __forceinline__ static int row() { return threadIdx.x / kSide; }
  __device__ __forceinline__ static int lane() { return threadIdx.x % kSide; }

  /// The index in the iteration space, or numel if the square reaches beyond it.
  __device__ __forceinline__ int64_t begin(int u, int64_t numel) const {
    const Position here = locate(lane(), row());
    const uint32_t at1 = here.at[1] + u * kRowStep;
    if (here.at[0] >= size[0] || at1 >= size[1]) return numel;
    return (int64_t{here.at[2]} * size[1] + at1) * size[0] + here.at[0];
  }

  __device__ __forceinline__ void stage(Stage& staged, int64_t) const {
    stage_each(staged, std::make_index_sequence<kArity>{});
    __syncthreads();
  }
  template <size_t... K>
  __device__ __forceinline__ void stage_each(Stage& staged, std::index_sequence<K...>) const {
    (stage_one<K, In>(staged), ...);
  }
  template <size_t K, class T>
  __device__ __forceinline__ void stage_one(Stage& staged) const {
    if (!transposed[K]) return;
    T* square = reinterpret_cast<T*>(staged.bytes[K]);
    const Position here = locate(row(), lane());
    const T* from = static_cast<const T*>(inputs[K]) + here.offset(stride[K]);
    T loaded[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (here.at[0] + u * kRowStep < size[0] && here.at[1] < size[1])
        loaded[u] = from[u * kRowStep * stride[K][0]];
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u)
      square[lane() * (kSide + 1) + row() + u * kRowStep] = loaded[u];
  }

  template <bool Full, class C>
  __device__ __forceinline__ void load(Packet<C>& packet, int64_t, int64_t, int u,
                                       const Stage& staged) const {
    load_each(packet, u, staged, std::make_index_sequence<kArity>{});
  }
  template <class C, size_t... K>
  __device__ __forceinline__ void load_each(elementwise::Packet<C, 1, In...>& packet, int u,
                                            const Stage& staged, std::index_sequence<K...>) const {
    const Position here = locate(lane(), row());
    const int at = (row() + u * kRowStep) * (kSide + 1) + lane();
    ((::cuda::std::get<K>(packet.vectors).lane[0] =
          transposed[K] ? reinterpret_cast<const In*>(staged.bytes[K])[at]
                        : static_cast<const In*>(
                              inputs[K])[here.offset(stride[K]) + u * kRowStep * stride[K][1]]),
     ...);
  }

  template <bool Full, class C>
  __device__ __forceinline__ void store(const Packet<C>&, const C (&results)[Outputs][1],
                                        int64_t at, int64_t numel, int u) const {
    if (at >= numel) return;
    const Position here = locate(lane(), row());
#pragma unroll
    for (int o = 0; o < Outputs; ++o)
      outputs[o][here.offset(out_stride[o]) + u * kRowStep * out_stride[o][1]] =
          convert<Out>(results[o][0]);
  }
};

}  // namespace elementwise
}  // namespace torchkiln::device
