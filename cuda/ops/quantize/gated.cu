// Gates in E4M3: activation(gate) * up, and the gradients of gate and up in both orientations. The
// kernels are those of rows.cuh and tiles.cuh, which compute a vector where `quantize` loads one.
// Both gradients of a tile are computed by adjacent blocks, so that the second one reads from L2.

#include "rows.cuh"
#include "tiles.cuh"
#include "torchkiln/core/functors.h"
#include "torchkiln/device/alignment.h"

namespace torchkiln {
namespace fp8 {
namespace {

/// Rows of an operand of the gate.
template <class T>
struct Rows {
  const T* data;
  int64_t stride;

  Rows(const void* data_, int64_t stride_) : data(static_cast<const T*>(data_)), stride(stride_) {}
  /// The vector at a row and column; 0 unless `wanted`.
  __device__ __forceinline__ Vec<T, kSide> load(int64_t row, int64_t column, bool wanted) const {
    Vec<T, kSide> found{};
    if (wanted) found = device::load_vector<kSide>(data + row * stride + column);
    return found;
  }
};

/// A reader of operands, of which it loads kOperands vectors for each one of the result.
template <class T_, int kOperands>
struct FromOperands {
  using T = T_;
  static constexpr bool kScaled = false;
  static constexpr int kRowsAtOnce = sizeof(T) == 2 && kOperands == 2 ? 4 : 2;
  struct Loaded {
    Vec<T, kSide> operand[kOperands];
  };
};

/// Rounds to T.
template <class T>
__device__ __forceinline__ Vec<T, kSide> rounded(const float (&values)[kSide]) {
  Vec<T, kSide> found;
#pragma unroll
  for (int i = 0; i < kSide; ++i) found.lane[i] = device::convert<T>(values[i]);
  return found;
}

template <class T, class Act>
struct FromGate : FromOperands<T, 2> {
  using typename FromOperands<T, 2>::Loaded;
  Rows<T> gate, up;

  explicit FromGate(const QuantizeGated& p) : gate(p.gate, p.gate_stride), up(p.up, p.up_stride) {}

  template <bool aligned>
  __device__ __forceinline__ Loaded load(const Quantize&, int64_t row, int64_t column,
                                         bool inside) const {
    static_assert(aligned, "whole vectors");
    return {{gate.load(row, column, inside), up.load(row, column, inside)}};
  }
  __device__ __forceinline__ Vec<T, kSide> finish(const Loaded& loaded, int64_t) const {
    float gates[kSide], ups[kSide];
    device::widen(loaded.operand[0], gates);
    device::widen(loaded.operand[1], ups);
    const Gated<Act, MathFor<T>> gated;
    float values[kSide];
#pragma unroll
    for (int i = 0; i < kSide; ++i) values[i] = gated(gates[i], ups[i]);
    return rounded<T>(values);
  }
};

template <class T, class Act>
struct FromGateGradient : FromOperands<T, 3> {
  using typename FromOperands<T, 3>::Loaded;
  Rows<T> grad, gate, up;
  int64_t half;  // columns of gate

  explicit FromGateGradient(const QuantizeGated& p)
      : grad(p.grad, p.grad_stride),
        gate(p.gate, p.gate_stride),
        up(p.up, p.up_stride),
        half(p.result.columns / 2) {}

  template <bool aligned>
  __device__ __forceinline__ Loaded load(const Quantize&, int64_t row, int64_t column,
                                         bool inside) const {
    static_assert(aligned, "whole vectors");
    const bool of_up = column >= half;
    const int64_t at = of_up ? column - half : column;
    return {{grad.load(row, at, inside), gate.load(row, at, inside),
             up.load(row, at, inside && !of_up)}};
  }
  __device__ __forceinline__ Vec<T, kSide> finish(const Loaded& loaded, int64_t column) const {
    const bool of_up = column >= half;
    float grads[kSide], gates[kSide], ups[kSide];
    device::widen(loaded.operand[0], grads);
    device::widen(loaded.operand[1], gates);
    device::widen(loaded.operand[2], ups);
    const GatedGradient<Act, MathFor<T>> gradient;
    float values[kSide];
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
      const Pair<float> both = gradient(grads[i], gates[i], ups[i]);
      values[i] = of_up ? both.second : both.first;
    }
    return rounded<T>(values);
  }
  /// Tiles of gate and up take turns.
  __device__ __forceinline__ int64_t tile_at(int64_t place, int64_t tiles) const {
    return tiles % 2 == 0 ? place % 2 * (tiles / 2) + place / 2 : place;
  }
};

template <class T, class Act>
Status launch(const QuantizeGated& p, cudaStream_t stream) {
  if (p.grad == nullptr) return launch_rows_of<true>(FromGate<T, Act>(p), p.result, stream);
  return launch_tiles_of<false, true, true>(FromGateGradient<T, Act>(p), p.result, stream);
}

}  // namespace
}  // namespace fp8

namespace cuda {

bool takes(const QuantizeGated& p) {
  constexpr int64_t kLane = fp8::kSide;
  const bool backward = p.grad != nullptr;
  const Quantize& to = p.result;
  const int64_t columns = backward ? to.columns / 2 : to.columns;
  const auto in_vectors = [&](const void* data, int64_t stride) {
    return device::rows_in_vectors(data, kLane, {columns, to.rows == 1 ? 0 : stride});
  };
  return in_vectors(p.gate, p.gate_stride) && in_vectors(p.up, p.up_stride) &&
         (!backward || in_vectors(p.grad, p.grad_stride)) && device::aligned(to.data, kLane) &&
         (to.transposed != nullptr) == backward &&
         (!backward || (to.rows % device::kVectorBytes == 0 && device::aligned(to.transposed)));
}

Status quantize_gated(const QuantizeGated& p, CUstream_st* stream) {
  if (p.result.rows == 0 || p.result.columns == 0) return {};
  return dispatch<float, __half, __nv_bfloat16>(p.result.dtype, [&](auto tag) {
    Status status{"this activation has no kernel"};
    with_activation(
        p.activation,
        [&](auto act) {
          status =
              fp8::launch<typename decltype(tag)::type, typename decltype(act)::type>(p, stream);
        },
        Gates{});
    return status;
  });
}

}  // namespace cuda
}  // namespace torchkiln
