#pragma once

// Accessor for problems with an operand that is transposed relative to the output.

#include "torchkiln/device/elementwise_access.cuh"

namespace torchkiln::device {
namespace elementwise {

/// Tiles of 32 x 32 elements along dimensions 0 and 1 or, for a short dimension 1, of 64 x 16,
/// 128 x 8 or 256 x 4. An input that is contiguous along dimension 1 is read along dimension 1 and
/// transposed in shared memory; every other operand is read along dimension 0. A third dimension,
/// if there is one, counts planes of tiles.
///
///      memory                          shared memory                    registers
///   a warp reads 32 elements along  ->  columns of a tile, padded    ->  a warp reads a part of a
///   dimension 1, or several times       rows                             row of the tile
///   4, 8 or 16
template <class OutType, int Outputs, class... In>
struct TransposedAccess {
  using Out = OutType;
  static constexpr int kArity = sizeof...(In);
  static constexpr int kOutputs = Outputs;
  static constexpr int kRank = 3;
  static constexpr int kLanes = 1;
  static constexpr int kUnroll = 4;
  static constexpr int kLogThreads = 8;
  static constexpr int kThreads = 1 << kLogThreads;
  static constexpr int kLogSide = 5;
  static constexpr int64_t kBlockElements = int64_t{kThreads} * kUnroll;
  static constexpr bool kHasFullBlocks = false;
  static_assert(kBlockElements == 1 << 2 * kLogSide);
  template <class C>
  using Packet = elementwise::Packet<C, 1, In...>;
  /// A tile of each input. The padding of its rows, 32 elements in all, puts the elements that a
  /// warp reads along dimension 1 into different banks.
  struct Stage {
    alignas(8) unsigned char bytes[kArity][(kBlockElements + (1 << kLogSide)) * 8];
  };

  Out* outputs[Outputs];
  const void* inputs[kArity];
  bool transposed[kArity];
  int64_t stride[kArity][kRank];
  int64_t out_stride[Outputs][kRank];
  uint32_t size[2];
  int log_side[2];       // of a tile
  int log_row_step[2];   // kLogThreads less log_side
  Divisor across, down;  // tiles along dimensions 0 and 1
  int64_t count;         // tiles in all

  int64_t blocks(int64_t) const { return count; }

  // Reading along dimension d, a thread owns the elements at lane(d) of this dimension, and at
  // row(d) + u * row_step(d) of the other one.
  __device__ __forceinline__ int row_step(int d) const { return 1 << log_row_step[d]; }
  __device__ __forceinline__ int row(int d) const {
    return static_cast<int>(threadIdx.x) >> log_side[d];
  }
  __device__ __forceinline__ int lane(int d) const {
    return static_cast<int>(threadIdx.x) & ((1 << log_side[d]) - 1);
  }
  /// How many of a thread's rows are among the next `left` ones.
  __device__ __forceinline__ int rows_within(int left, int d) const {
    return ((left - 1) >> log_row_step[d]) + 1;
  }
  /// Elements from a row of a tile to the next one, in shared memory.
  __device__ __forceinline__ int pitch() const {
    return (1 << log_side[0]) + (1 << kLogSide >> log_side[1]);
  }

  /// The tile and the elements of a thread. The thread computes them once; nvcc would compute
  /// them for every element.
  struct Place {
    const Stage* staged;
    ::cuda::std::tuple<Vec<In, kUnroll>...> loaded;
    uint32_t at[kRank];   // of the tile's first element
    int rows;             // of the thread; none if lane(0) is outside of the tensor
    int64_t index;        // of element (lane(0), row(0)) in the iteration space
    int64_t to[Outputs];  // its offset in the outputs

    __device__ __forceinline__ bool has(int u, int64_t, int64_t) const { return u < rows; }
  };

  /// The index in the iteration space, or numel if the tile reaches beyond it.
  __device__ __forceinline__ int64_t begin(int u, int64_t numel, const Place& place) const {
    return place.has(u, 0, numel) ? place.index + int64_t{u * row_step(0)} * size[0] : numel;
  }

  __device__ __forceinline__ Place stage(Stage& staged, int64_t) const {
    const uint32_t row_of_tiles = across.quotient(blockIdx.x);
    const uint32_t plane = down.quotient(row_of_tiles);
    Place place;
    place.staged = &staged;
    place.at[0] = (blockIdx.x - row_of_tiles * across.divisor()) << log_side[0];
    place.at[1] = (row_of_tiles - plane * down.divisor()) << log_side[1];
    place.at[2] = plane;
    const uint32_t at0 = place.at[0] + lane(0), at1 = place.at[1] + row(0);
    place.rows = at0 < size[0] ? rows_within(static_cast<int>(size[1] - at1), 0) : 0;
    place.index = (int64_t{plane} * size[1] + at1) * size[0] + at0;
#pragma unroll
    for (int o = 0; o < Outputs; ++o)
      place.to[o] = at0 * out_stride[o][0] + at1 * out_stride[o][1] + plane * out_stride[o][2];
    stage_each(staged, place, std::make_index_sequence<kArity>{});
    __syncthreads();
    return place;
  }
  /// The loads of all inputs are in flight together: the first write to shared memory waits.
  template <size_t... K>
  __device__ __forceinline__ void stage_each(Stage& staged, Place& place,
                                             std::index_sequence<K...>) const {
    (fetch<K>(::cuda::std::get<K>(place.loaded), place), ...);
    (put<K>(::cuda::std::get<K>(place.loaded), staged), ...);
  }
  template <size_t K, class T>
  __device__ __forceinline__ void fetch(Vec<T, kUnroll>& loaded, const Place& place) const {
    // The thread's elements lie along dimension 0 or 1.
    const bool along_0 = transposed[K];
    const int fast = along_0 ? 1 : 0;
    const uint32_t at = (along_0 ? place.at[0] : place.at[1]) + row(fast);
    const uint32_t other = (along_0 ? place.at[1] : place.at[0]) + lane(fast);
    const int64_t step = along_0 ? stride[K][0] : stride[K][1];
    const T* from = static_cast<const T*>(inputs[K]) + at * step +
                    other * (along_0 ? stride[K][1] : stride[K][0]) + place.at[2] * stride[K][2];
    const bool is_inside = other < (along_0 ? size[1] : size[0]);
    const int left =
        is_inside ? rows_within(static_cast<int>((along_0 ? size[0] : size[1]) - at), fast) : 0;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u, from += row_step(fast) * step)
      if (u < left) loaded.lane[u] = *from;
  }
  template <size_t K, class T>
  __device__ __forceinline__ void put(const Vec<T, kUnroll>& loaded, Stage& staged) const {
    if (!transposed[K]) return;
    T* tile = reinterpret_cast<T*>(staged.bytes[K]);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u)
      tile[lane(1) * pitch() + row(1) + u * row_step(1)] = loaded.lane[u];
  }

  template <bool Full, class C>
  __device__ __forceinline__ void load(Packet<C>& packet, int64_t, int64_t, int u,
                                       const Place& place) const {
    load_each(packet, u, place, std::make_index_sequence<kArity>{});
  }
  template <class C, size_t... K>
  __device__ __forceinline__ void load_each(elementwise::Packet<C, 1, In...>& packet, int u,
                                            const Place& place, std::index_sequence<K...>) const {
    const int at = (row(0) + u * row_step(0)) * pitch() + lane(0);
    ((::cuda::std::get<K>(packet.vectors).lane[0] =
          transposed[K] ? reinterpret_cast<const In*>(place.staged->bytes[K])[at]
                        : ::cuda::std::get<K>(place.loaded).lane[u]),
     ...);
  }

  template <bool Full, class C>
  __device__ __forceinline__ void store(const Packet<C>&, const C (&results)[Outputs][1],
                                        int64_t at, int64_t numel, int u,
                                        const Place& place) const {
    if (!place.has(u, at, numel)) return;
#pragma unroll
    for (int o = 0; o < Outputs; ++o)
      outputs[o][place.to[o] + u * row_step(0) * out_stride[o][1]] = convert<Out>(results[o][0]);
  }
};

}  // namespace elementwise
}  // namespace torchkiln::device
