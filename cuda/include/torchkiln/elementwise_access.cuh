#pragma once

// How the elementwise kernels reach their operands, from the narrowest case to the widest:
//
//   LinearAccess  every operand lies in the order of the iteration space: pure streaming, no index
//                 arithmetic
//   RowAccess     every operand is contiguous along the innermost dimension: one offset a vector
//                 (row-strided tensors, a bias along the last dimension, halves of a packed tensor)
//   TurnedAccess  an input is transposed beside the output: squares through shared memory
//   AnyAccess     every other stride, alignment and mix of dtypes: an element at a time
//
// An accessor is a kernel parameter. load<Full>(packet, at, numel) reads what belongs to the kLanes
// elements from `at` on, all of which exist when Full; packet.get<K>(lane) is the value of input K;
// store<Full>(packet, results, at, numel, u) rounds and writes. place(u, numel) is where the
// thread's u-th run of them begins; stage() runs before all that, in all threads of a block.

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

struct Nothing {};

/// Vectors of a thread. With a block of 256 of them, a tensor of some megabytes is one wave of
/// blocks. With two-byte elements, whose eight lanes take more arithmetic, a thread has enough to
/// do with one.
template <class Out>
inline constexpr int kUnroll = kVectorLanes<Out> > 4 ? 1 : 2;

/// Stores N adjacent elements, or those of them that lie below numel.
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
  static constexpr bool kHasFullBlocks = true;  // worth code of their own
  template <class C>
  using Packet = elementwise::Packet<C, kLanes, In...>;

  Out* outputs[Outputs];
  const void* inputs[kArity];

  using Stage = Nothing;
  __device__ __forceinline__ static void stage(Stage&, int64_t) {}

  static int64_t blocks(int64_t numel) { return ceil_div(numel, kBlockElements); }

  /// Where the thread's vector u begins.
  __device__ __forceinline__ static int64_t place(int u, int64_t) {
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
                                        int64_t at, int64_t numel, int) const {
#pragma unroll
    for (int o = 0; o < Outputs; ++o) store_vector<Full>(outputs[o] + at, results[o], at, numel);
  }
};

/// Up to three dimensions, counted in whole vectors: the innermost size and all strides are
/// multiples of one, so that 32 bits reach far and no vector is cut. Where the first input and the
/// outputs lie in the order of the space (an activation beside its bias), that input is loaded
/// before any index is computed. The code is straight, since small tensors wait for every
/// instruction.
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
  static constexpr bool kHasFullBlocks = true;  // worth code of their own
  template <class C>
  using Packet = elementwise::Packet<C, kLanes, In...>;

  Out* outputs[Outputs];
  const void* inputs[kArity];
  Divisor size[kRank - 1];
  uint32_t stride[kArity][kRank];
  uint32_t out_stride[Outputs][kRank];

  using Stage = Nothing;
  __device__ __forceinline__ static void stage(Stage&, int64_t) {}

  static int64_t blocks(int64_t numel) { return ceil_div(numel, kBlockElements); }

  /// Where the thread's vector u begins.
  __device__ __forceinline__ static int64_t place(int u, int64_t) {
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
    ((::cuda::std::get<K>(packet.vectors) =
          load_vector<N>(static_cast<const In*>(inputs[K]) +
                         (FirstIsLinear && K == 0 ? at : offset(stride[K], at, N)))),
     ...);
  }

  template <bool Full, class C, int N>
  __device__ __forceinline__ void store(const Packet<C>&, const C (&results)[Outputs][N],
                                        int64_t at, int64_t numel, int) const {
    if (!Full && at >= numel) return;
#pragma unroll
    for (int o = 0; o < Outputs; ++o)
      torchkiln::store(outputs[o] + (FirstIsLinear ? at : offset(out_stride[o], at, N)),
                       results[o]);
  }

  __device__ __forceinline__ int64_t offset(const uint32_t (&strides)[kRank], int64_t at,
                                            int lanes) const {
    const uint32_t vector = static_cast<uint32_t>(at / lanes);
    const uint32_t row = size[0].quotient(vector);
    const uint32_t slab = size[1].quotient(row);
    const uint32_t place[kRank] = {vector - row * size[0].divisor(), row - slab * size[1].divisor(),
                                   slab};
    uint32_t offset = 0;
#pragma unroll
    for (int d = 0; d < kRank; ++d) offset += place[d] * strides[d];
    return static_cast<int64_t>(offset) * lanes;
  }
};

/// Squares of 32 x 32 elements along dimensions 0 and 1, for inputs that are contiguous along
/// dimension 1 (transposed beside the output): a warp reads them along that one, and shared memory
/// turns them. A third dimension may count such planes.
template <class OutType, int Outputs, class... In>
struct TurnedAccess {
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
  /// A square of each input; the odd length of its rows keeps columns out of one bank.
  struct Stage {
    alignas(8) unsigned char bytes[kArity][kSide * (kSide + 1) * 8];
  };

  Out* outputs[Outputs];
  const void* inputs[kArity];
  bool turned[kArity];
  int64_t stride[kArity][kRank];
  int64_t out_stride[Outputs][kRank];
  uint32_t size[2];
  Divisor across, down;  // squares along dimensions 0 and 1
  int64_t count;         // of squares

  int64_t blocks(int64_t) const { return count; }

  /// Element (i0, i1) of the block's square.
  struct Place {
    uint32_t at[kRank];

    __device__ __forceinline__ int64_t offset(const int64_t (&strides)[kRank]) const {
      return at[0] * strides[0] + at[1] * strides[1] + at[2] * strides[2];
    }
  };
  __device__ __forceinline__ Place locate(int i0, int i1) const {
    const uint32_t row_of_squares = across.quotient(blockIdx.x);
    const uint32_t plane = down.quotient(row_of_squares);
    return {{(blockIdx.x - row_of_squares * across.divisor()) * kSide + i0,
             (row_of_squares - plane * down.divisor()) * kSide + i1, plane}};
  }

  // A thread is in column lane() of the square and in rows row() + u * kRowStep: read along the
  // other dimension, what is a row becomes a column.
  static constexpr int kRowStep = kThreads / kSide;
  __device__ __forceinline__ static int row() { return threadIdx.x / kSide; }
  __device__ __forceinline__ static int lane() { return threadIdx.x % kSide; }

  /// The place in the iteration space, or numel where the square reaches beyond it.
  __device__ __forceinline__ int64_t place(int u, int64_t numel) const {
    const Place here = locate(lane(), row());
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
    if (!turned[K]) return;
    T* square = reinterpret_cast<T*>(staged.bytes[K]);
    const Place here = locate(row(), lane());
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
    const Place here = locate(lane(), row());
    const int at = (row() + u * kRowStep) * (kSide + 1) + lane();
    ((::cuda::std::get<K>(packet.vectors).lane[0] =
          turned[K] ? reinterpret_cast<const In*>(staged.bytes[K])[at]
                    : static_cast<const In*>(
                          inputs[K])[here.offset(stride[K]) + u * kRowStep * stride[K][1]]),
     ...);
  }

  template <bool Full, class C>
  __device__ __forceinline__ void store(const Packet<C>&, const C (&results)[Outputs][1],
                                        int64_t at, int64_t numel, int u) const {
    if (at >= numel) return;
    const Place here = locate(lane(), row());
#pragma unroll
    for (int o = 0; o < Outputs; ++o)
      outputs[o][here.offset(out_stride[o]) + u * kRowStep * out_stride[o][1]] =
          convert<Out>(results[o][0]);
  }
};

/// One element of each input, as it lies in memory, and where the results go.
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

// Not inlined: a hundred instructions, for tensors of more than 2^31 elements.
inline __device__ __noinline__ int64_t divide(uint64_t a, uint64_t b) { return a / b; }

/// A thread owns single elements, and a warp adjacent ones: whatever lies evenly is still read
/// together. Indices are divided once for all operands; what is loaded keeps its bits until all
/// loads are on the way.
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
  using Stage = Nothing;

  Elementwise<Arity, Outputs> arguments;
  bool narrow;             // fewer than 2^31 elements: indices are divided by
  Divisor size[kMaxRank];  // these, since a 64-bit division costs a hundred instructions

  static int64_t blocks(int64_t numel) { return ceil_div(numel, kBlockElements); }
  __device__ __forceinline__ static void stage(Stage&, int64_t) {}

  __device__ __forceinline__ static int64_t place(int u, int64_t) {
    return blockIdx.x * kBlockElements + threadIdx.x + u * kThreads;
  }

  /// Calls body(d, place along dimension d) for element `at`.
  template <class Body>
  __device__ __forceinline__ void locate(int64_t at, const Body& body) const {
    const auto& layout = arguments.layout;
#pragma unroll 1
    for (int d = 0; d < layout.rank; ++d) {
      int64_t place = at;
      if (d + 1 < layout.rank) {
        const int64_t rest =
            narrow ? size[d].quotient(static_cast<uint32_t>(at)) : divide(at, layout.size[d]);
        place = at - rest * layout.size[d];
        at = rest;
      }
      body(d, place);
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
    locate(at, [&](int d, int64_t place) {
#pragma unroll
      for (int k = 0; k < Arity; ++k) offset[k] += place * layout.stride[k][d];
#pragma unroll
      for (int o = 0; o < Outputs; ++o) packet.out_offset[o] += place * layout.out_stride[o][d];
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
                                        int) const {
    if (!Full && at >= numel) return;
#pragma unroll
    for (int o = 0; o < Outputs; ++o)
      static_cast<Out*>(arguments.out[o])[packet.out_offset[o]] = convert<Out>(results[o][0]);
  }
};

template <class In, int Inputs, int Outputs>
bool reads_linearly(const Elementwise<Inputs, Outputs>& arguments, int k) {
  return arguments.in_dtype[k] == DtypeOf<In>::value && arguments.layout.linear(k) &&
         aligned(arguments.in[k], kVectorBytes);
}

template <int Inputs, int Outputs>
bool writes_linearly(const Elementwise<Inputs, Outputs>& arguments, int o) {
  return arguments.layout.out_linear(o) && aligned(arguments.out[o], kVectorBytes);
}

/// Whether these strides lead to whole vectors of so many elements along dimension 0, counted in 32
/// bits.
template <int Inputs, int Outputs>
bool lies_in_rows(const Layout<Inputs, Outputs>& layout, const int64_t (&strides)[kMaxRank],
                  const void* data, int lanes) {
  constexpr int kRank = 3;  // of RowAccess
  if (!aligned(data, kVectorBytes) || layout.rank == 0 || layout.rank > kRank) return false;
  if (layout.size[0] % lanes != 0 || strides[0] != 1) return false;
  int64_t reach = layout.size[0] / lanes;
  for (int d = 1; d < layout.rank; ++d) {
    if (strides[d] % lanes != 0) return false;
    reach += (layout.size[d] - 1) * (strides[d] / lanes);
  }
  return reach < int64_t{1} << 32 && layout.numel / lanes < int64_t{1} << 31;
}

/// The accessors of one problem: inputs of exactly the types In are reached fast.
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
    for (int o = 0; o < Outputs; ++o) {
      if (!lies_in_rows(arguments.layout, arguments.layout.out_stride[o], arguments.out[o], lanes))
        return false;
    }
    return all_inputs_rows(arguments, lanes, kEach);
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
    const auto in_vectors = [&](uint32_t (&to)[3], const int64_t (&strides)[kMaxRank]) {
      to[0] = 1;
      for (int d = 1; d < layout.rank; ++d) to[d] = static_cast<uint32_t>(strides[d] / lanes);
    };
    for (int o = 0; o < Outputs; ++o) {
      access.outputs[o] = static_cast<Out*>(arguments.out[o]);
      in_vectors(access.out_stride[o], layout.out_stride[o]);
    }
    for (int k = 0; k < kInputs; ++k) {
      access.inputs[k] = arguments.in[k];
      in_vectors(access.stride[k], layout.stride[k]);
    }
    return access;
  }

  /// Whether some input runs along dimension 1 while the output runs along dimension 0, in planes
  /// that are worth squares. Where threads share bytes of a mask, eight neighbours along dimension
  /// 0 have to be one byte.
  template <int Outputs>
  static bool is_turned(const Elementwise<kInputs, Outputs>& arguments, bool whole_bytes) {
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
  static TurnedAccess<Out, Outputs, In...> turned(const Elementwise<kInputs, Outputs>& arguments) {
    const auto& layout = arguments.layout;
    TurnedAccess<Out, Outputs, In...> access{};
    for (int o = 0; o < Outputs; ++o) {
      access.outputs[o] = static_cast<Out*>(arguments.out[o]);
      for (int d = 0; d < layout.rank; ++d) access.out_stride[o][d] = layout.out_stride[o][d];
    }
    for (int k = 0; k < kInputs; ++k) {
      access.inputs[k] = arguments.in[k];
      access.turned[k] = runs_along_1(layout, k);
      for (int d = 0; d < layout.rank; ++d) access.stride[k][d] = layout.stride[k][d];
    }
    for (int d = 0; d < 2; ++d) access.size[d] = static_cast<uint32_t>(layout.size[d]);
    access.across = Divisor(static_cast<uint32_t>(ceil_div(layout.size[0], access.kSide)));
    access.down = Divisor(static_cast<uint32_t>(ceil_div(layout.size[1], access.kSide)));
    access.count = squares(layout);
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
    constexpr int kSide = TurnedAccess<Out, 1, In...>::kSide;
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
             lies_in_rows(arguments.layout, arguments.layout.stride[K], arguments.in[K], lanes)) &&
            ...);
  }
};

}  // namespace elementwise
}  // namespace torchkiln
