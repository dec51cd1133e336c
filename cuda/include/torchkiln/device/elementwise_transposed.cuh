#pragma once

// Accessor for problems with an operand that is transposed relative to the output.

#include "torchkiln/device/elementwise_access.cuh"

namespace torchkiln::device {
namespace elementwise {

/// Access to squares of 32 x 32 elements along dimensions 0 and 1. An input that is contiguous
/// along dimension 1 is read along dimension 1 and transposed in shared memory; every other operand
/// is read along dimension 0. A third dimension, if there is one, counts planes of squares.
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

  // A thread has column lane() of the square, in rows row() + u * kRowStep. When it reads along the
  // other dimension, it has the transposed elements.
  static constexpr int kRowStep = kThreads / kSide;
  __device__ __forceinline__ static int row() { return threadIdx.x / kSide; }
  __device__ __forceinline__ static int lane() { return threadIdx.x % kSide; }

  /// The square and the elements of a thread. The thread computes them once, because nvcc would
  /// compute them for every element.
  struct Place {
    const Stage* staged;
    ::cuda::std::tuple<Vec<In, kUnroll>...> loaded;
    uint32_t at[kRank];   // index of the square's first element
    int rows;             // inside rows from row() on; 0 if lane() is outside
    int64_t index;        // index of element (lane(), row()) in the iteration space
    int64_t to[Outputs];  // its offset in the outputs

    __device__ __forceinline__ bool has(int u, int64_t, int64_t) const {
      return u * kRowStep < rows;
    }
  };

  /// The index of an element in the iteration space, or numel if the square reaches beyond the
  /// space there.
  __device__ __forceinline__ int64_t begin(int u, int64_t numel, const Place& place) const {
    return place.has(u, 0, numel) ? place.index + int64_t{u * kRowStep} * size[0] : numel;
  }

  __device__ __forceinline__ Place stage(Stage& staged, int64_t) const {
    const uint32_t row_of_squares = across.quotient(blockIdx.x);
    const uint32_t plane = down.quotient(row_of_squares);
    Place place;
    place.staged = &staged;
    place.at[0] = (blockIdx.x - row_of_squares * across.divisor()) * kSide;
    place.at[1] = (row_of_squares - plane * down.divisor()) * kSide;
    place.at[2] = plane;
    const uint32_t at0 = place.at[0] + lane(), at1 = place.at[1] + row();
    place.rows = at0 < size[0] ? static_cast<int>(size[1] - at1) : 0;
    place.index = (int64_t{plane} * size[1] + at1) * size[0] + at0;
#pragma unroll
    for (int o = 0; o < Outputs; ++o)
      place.to[o] = at0 * out_stride[o][0] + at1 * out_stride[o][1] + plane * out_stride[o][2];
    stage_each(staged, place, std::make_index_sequence<kArity>{});
    __syncthreads();
    return place;
  }
  /// Issues the loads of all inputs before the first write to shared memory, which waits for them.
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
    const uint32_t at = (along_0 ? place.at[0] : place.at[1]) + row();
    const uint32_t other = (along_0 ? place.at[1] : place.at[0]) + lane();
    const int64_t step = along_0 ? stride[K][0] : stride[K][1];
    const T* from = static_cast<const T*>(inputs[K]) + at * step +
                    other * (along_0 ? stride[K][1] : stride[K][0]) + place.at[2] * stride[K][2];
    const bool is_inside = other < (along_0 ? size[1] : size[0]);
    const int left = is_inside ? static_cast<int>((along_0 ? size[0] : size[1]) - at) : 0;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u, from += kRowStep * step)
      if (u * kRowStep < left) loaded.lane[u] = *from;
  }
  template <size_t K, class T>
  __device__ __forceinline__ void put(const Vec<T, kUnroll>& loaded, Stage& staged) const {
    if (!transposed[K]) return;
    T* square = reinterpret_cast<T*>(staged.bytes[K]);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u)
      square[lane() * (kSide + 1) + row() + u * kRowStep] = loaded.lane[u];
  }

  template <bool Full, class C>
  __device__ __forceinline__ void load(Packet<C>& packet, int64_t, int64_t, int u,
                                       const Place& place) const {
    load_each(packet, u, place, std::make_index_sequence<kArity>{});
  }
  template <class C, size_t... K>
  __device__ __forceinline__ void load_each(elementwise::Packet<C, 1, In...>& packet, int u,
                                            const Place& place, std::index_sequence<K...>) const {
    const int at = (row() + u * kRowStep) * (kSide + 1) + lane();
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
      outputs[o][place.to[o] + u * kRowStep * out_stride[o][1]] = convert<Out>(results[o][0]);
  }
};

}  // namespace elementwise
}  // namespace torchkiln::device
