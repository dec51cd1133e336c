#pragma once

// Accessors: how elementwise kernels load and store their operands, from the most special case
// to the most general one:
//
//   LinearAccess      every operand has the order of the iteration space: no index arithmetic
//   RowAccess         every operand is contiguous along the innermost dimension, or an input is
//                     constant along it: one offset per vector (row-strided tensors, a bias along
//                     the last dimension, a number per row, halves of a packed tensor)
//   TransposedAccess  an input is transposed relative to the output: 32 x 32 squares through shared
//                     memory
//   ElementAccess     two dimensions of any strides and alignments (rows that are not whole
//                     vectors): one element at a time
//   AnyAccess         more dimensions, and mixed dtypes: one element at a time
//
// An accessor is a kernel parameter. In a kernel:
//   stage(staged, numel)                   fills shared memory; all threads of the block call it.
//                                          Returns a place, which the other functions take
//   place.has(u, at, numel)                whether the tensor has the thread's u-th vector
//   begin(u, numel, place)                 the first element of the thread's u-th vector
//   load<Full>(packet, at, numel, u, place)  reads kLanes elements from index `at` on
//   packet.get<K>(lane)                    the value of input K
//   store<Full>(packet, results, at, numel, u, place)  rounds and writes the results
// Full: all kLanes elements exist, so that no bounds are checked.

#include <cuda/std/tuple>
#include <utility>

#include "torchkiln/core/layout.h"
#include "torchkiln/device/fast_divide.cuh"
#include "torchkiln/device/launch.cuh"
#include "torchkiln/device/vec.cuh"

namespace torchkiln::device {
namespace elementwise {

/// The loads of one thread: N elements of each input, converted when they are used.
template <class C, int N, class... In>
struct Packet {
  ::cuda::std::tuple<Vec<In, N>...> vectors;

  template <size_t K>
  __device__ __forceinline__ C get(int lane) const {
    return convert<C>(::cuda::std::get<K>(vectors).lane[lane]);
  }
};

/// The Stage and the Place of accessors that need no shared memory.
struct NoStage {
  __device__ __forceinline__ static bool has(int, int64_t at, int64_t numel) { return at < numel; }
};

/// Vectors per thread. A block covers 256 vectors, so that a tensor of a few MB is one wave of
/// blocks. For 2-byte types, one vector of eight lanes is enough arithmetic per thread.
template <class Out>
inline constexpr int kUnroll = kVectorLanes<Out> > 4 ? 1 : 2;

/// Whether blocks that are entirely inside the tensor have a separate loop without bounds checks.
/// Not for float64, because its code is long.
template <class Out>
inline constexpr bool kHasFullBlocks = sizeof(Out) < 8;

/// Stores N adjacent elements, except elements at or beyond numel.
template <bool Full, class Out, class C, int N>
__device__ __forceinline__ void store_vector(Out* out, const C (&result)[N], int64_t at,
                                             int64_t numel) {
  if (Full || at + N <= numel) {
    store(out, result);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (at + i < numel) out[i] = convert<Out>(result[i]);
    }
  }
}

template <class OutType, int Outputs, class... In>
struct LinearAccess {
  using Out = OutType;
  static constexpr int kArity = sizeof...(In);
  static constexpr int kOutputs = Outputs;
  static constexpr int kLanes = kVectorLanes<Out>;
  static constexpr int kUnroll = elementwise::kUnroll<Out>;
  static constexpr int kThreads = 256 / kUnroll;
  static constexpr int64_t kBlockElements = int64_t{256} * kLanes;
  static constexpr bool kHasFullBlocks = elementwise::kHasFullBlocks<Out>;
  template <class C>
  using Packet = elementwise::Packet<C, kLanes, In...>;

  Out* outputs[Outputs];
  const void* inputs[kArity];

  using Stage = NoStage;
  __device__ __forceinline__ static Stage stage(Stage&, int64_t) { return {}; }

  static int64_t blocks(int64_t numel) { return ceil_div(numel, kBlockElements); }

  /// The index of the first element of the thread's vector u.
  __device__ __forceinline__ static int64_t begin(int u, int64_t, const Stage&) {
    return blockIdx.x * kBlockElements + (threadIdx.x + u * kThreads) * kLanes;
  }

  template <bool Full, class C, int N>
  __device__ __forceinline__ void load(elementwise::Packet<C, N, In...>& packet, int64_t at,
                                       int64_t numel, int, const Stage&) const {
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

  template <bool Full, class C, int N>
  __device__ __forceinline__ void store(const Packet<C>&, const C (&results)[Outputs][N],
                                        int64_t at, int64_t numel, int, const Stage&) const {
#pragma unroll
    for (int o = 0; o < Outputs; ++o) store_vector<Full>(outputs[o] + at, results[o], at, numel);
  }
};

/// Access to rows of up to three dimensions. The innermost size and all strides are multiples of a
/// vector and are counted in vectors, so that no vector is cut, and 32 bits suffice for large
/// tensors. The strides of an input that is constant along a row count elements. FirstIsLinear: the
/// first input and the outputs have the order of the iteration space, and no input is constant
/// along a row (a tensor and its bias); that input is loaded before any index is computed. The code
/// is straight-line, because small tensors are bound by latency.
template <bool FirstIsLinear, class OutType, int Outputs, class... In>
struct RowAccess {
  using Out = OutType;
  static constexpr int kArity = sizeof...(In);
  static constexpr int kOutputs = Outputs;
  static constexpr int kRank = 3;
  static constexpr int kLanes = kVectorLanes<Out>;
  static constexpr int kUnroll = elementwise::kUnroll<Out>;
  static constexpr int kThreads = 256 / kUnroll;
  static constexpr int64_t kBlockElements = int64_t{256} * kLanes;
  static constexpr bool kHasFullBlocks = FirstIsLinear && elementwise::kHasFullBlocks<Out>;
  template <class C>
  using Packet = elementwise::Packet<C, kLanes, In...>;

  Out* outputs[Outputs];
  const void* inputs[kArity];
  Divisor size[kRank - 1];
  uint32_t stride[kArity][kRank];
  uint32_t out_stride[Outputs][kRank];
  bool repeated[kArity];  // the input is constant along dimension 0

  using Stage = NoStage;
  __device__ __forceinline__ static Stage stage(Stage&, int64_t) { return {}; }

  static int64_t blocks(int64_t numel) { return ceil_div(numel, kBlockElements); }

  /// The index of the first element of the thread's vector u.
  __device__ __forceinline__ static int64_t begin(int u, int64_t, const Stage&) {
    return blockIdx.x * kBlockElements + (threadIdx.x + u * kThreads) * kLanes;
  }

  template <bool Full, class C, int N>
  __device__ __forceinline__ void load(elementwise::Packet<C, N, In...>& packet, int64_t at,
                                       int64_t, int, const Stage&) const {
    load_each(packet, at, std::make_index_sequence<kArity>{});
  }

  template <class C, int N, size_t... K>
  __device__ __forceinline__ void load_each(elementwise::Packet<C, N, In...>& packet, int64_t at,
                                            std::index_sequence<K...>) const {
    (load_run<K>(::cuda::std::get<K>(packet.vectors), static_cast<const In*>(inputs[K]), at), ...);
    // Constant inputs are loaded last, because filling a vector with an element waits for its load.
    if constexpr (!FirstIsLinear)
      (fill<K>(::cuda::std::get<K>(packet.vectors), static_cast<const In*>(inputs[K]), at), ...);
  }

  template <size_t K, class T, int N>
  __device__ __forceinline__ void load_run(Vec<T, N>& vector, const T* from, int64_t at) const {
    if constexpr (FirstIsLinear && K == 0) {
      vector = load_vector<N>(from + at);
    } else if (FirstIsLinear || !repeated[K]) {
      vector = load_vector<N>(from + int64_t{offset(stride[K], at, N)} * N);
    }
  }

  template <size_t K, class T, int N>
  __device__ __forceinline__ void fill(Vec<T, N>& vector, const T* from, int64_t at) const {
    if (!repeated[K]) return;
    const T element = from[offset(stride[K], at, N)];
#pragma unroll
    for (int i = 0; i < N; ++i) vector.lane[i] = element;
  }

  template <bool Full, class C, int N>
  __device__ __forceinline__ void store(const Packet<C>&, const C (&results)[Outputs][N],
                                        int64_t at, int64_t numel, int, const Stage&) const {
    if (!Full && at >= numel) return;
#pragma unroll
    for (int o = 0; o < Outputs; ++o) {
      const int64_t to = FirstIsLinear ? at : int64_t{offset(out_stride[o], at, N)} * N;
      device::store(outputs[o] + to, results[o]);
    }
  }

  /// The offset of element `at`, in the unit of the strides.
  __device__ __forceinline__ uint32_t offset(const uint32_t (&strides)[kRank], int64_t at,
                                             int lanes) const {
    const uint32_t vector = static_cast<uint32_t>(at / lanes);
    const uint32_t row = size[0].quotient(vector);
    const uint32_t slab = size[1].quotient(row);
    const uint32_t index[kRank] = {vector - row * size[0].divisor(), row - slab * size[1].divisor(),
                                   slab};
    uint32_t offset = 0;
#pragma unroll
    for (int d = 0; d < kRank; ++d) offset += index[d] * strides[d];
    return offset;
  }
};

}  // namespace elementwise
}  // namespace torchkiln::device
