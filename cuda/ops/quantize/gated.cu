// Gates in E4M3: activation(gate) * up, and the gradients of gate and up in both orientations. The
// kernels are those of rows.cuh and tiles.cuh; they compute a vector where `quantize` loads one. A
// block computes both gradients of a tile from one read. Float32 is excluded there, because two
// tiles of it would exceed the shared memory.

#include <cuda_pipeline_primitives.h>

#include "rows.cuh"
#include "tiles.cuh"
#include "torchkiln/core/functors.h"
#include "torchkiln/device/alignment.h"

namespace torchkiln {
namespace fp8 {
namespace {

/// One operand of the gate, as rows of elements.
template <class T>
struct Rows {
  const T* data;
  int64_t stride;

  Rows(const void* data_, int64_t stride_) : data(static_cast<const T*>(data_)), stride(stride_) {}
  /// The vector at row first_row + r and a column; 0 unless `wanted`.
  __device__ __forceinline__ Words<T> load(int64_t first_row, int r, int64_t column,
                                           bool wanted) const {
    return load_if(wanted, data + first_row * stride + column + r * stride);
  }
  /// Starts to copy the same vector to shared memory. Its address is valid even if it is not
  /// `wanted`.
  __device__ __forceinline__ void copy(int64_t first_row, int r, int64_t column, bool wanted,
                                       Vec<T, kSide>& to) const {
    __pipeline_memcpy_async(&to, data + first_row * stride + column + r * stride, sizeof(to),
                            wanted ? 0 : sizeof(to));
  }
};

/// Rounds two numbers to T, and stores them as elements of `vector`.
template <class T>
__device__ __forceinline__ void round_to(Vec<T, kSide>& vector, int pair, float low, float high) {
  auto* const to = &vector.lane[2 * pair];
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(low, high);
  } else if constexpr (std::is_same_v<T, __half>) {
    *reinterpret_cast<__half2*>(to) = __floats2half2_rn(low, high);
  } else {
    to[0] = low;
    to[1] = high;
  }
}

template <class T_, class Act>
struct FromGate {
  using T = T_;
  static constexpr int kResults = 1;
  static constexpr int kRowsAtOnce = sizeof(T) == 2 ? 4 : 2;
  struct Loaded {
    Words<T> gate, up;
  };
  Rows<T> gate, up;

  explicit FromGate(const QuantizeGated& p) : gate(p.gate, p.gate_stride), up(p.up, p.up_stride) {}

  template <bool aligned>
  __device__ __forceinline__ Loaded load(const Quantize&, int64_t first_row, int r, int64_t column,
                                         bool inside) const {
    static_assert(aligned, "whole vectors");
    return {gate.load(first_row, r, column, inside), up.load(first_row, r, column, inside)};
  }
  __device__ __forceinline__ void finish(const Loaded& loaded,
                                         Vec<T, kSide> (&results)[kResults]) const {
    float gates[kSide], ups[kSide];
    device::widen(loaded.gate.vector(), gates);
    device::widen(loaded.up.vector(), ups);
    const Gated<Act, MathFor<T>> gated;
#pragma unroll
    for (int i = 0; i < kSide; i += 2)
      round_to(results[0], i / 2, gated(gates[i], ups[i]), gated(gates[i + 1], ups[i + 1]));
  }
};

template <class T_, class Act>
struct FromGateGradient {
  using T = T_;
  static constexpr int kResults = 2;
  static constexpr int kBlocksPerSm = 3;
  Rows<T> grad, gate, up;

  explicit FromGateGradient(const QuantizeGated& p)
      : grad(p.grad, p.grad_stride), gate(p.gate, p.gate_stride), up(p.up, p.up_stride) {}

  /// Loads the operand that a thread keeps in registers.
  __device__ __forceinline__ Words<T> load(int64_t first_row, int r, int64_t column,
                                           bool inside) const {
    return grad.load(first_row, r, column, inside);
  }
  /// Copies the other operand to the memory of result k, which overwrites it later.
  __device__ __forceinline__ void copy(int k, int64_t first_row, int r, int64_t column, bool inside,
                                       Vec<T, kSide>& to) const {
    (k == 0 ? gate : up).copy(first_row, r, column, inside, to);
  }
  __device__ __forceinline__ void finish(const Vec<T, kSide>& held,
                                         Vec<T, kSide> (&results)[kResults]) const {
    float grads[kSide], gates[kSide], ups[kSide];
    device::widen(held, grads);
    device::widen(results[0], gates);
    device::widen(results[1], ups);
    const GatedGradient<Act, MathFor<T>> gradient;
#pragma unroll
    for (int i = 0; i < kSide; i += 2) {
      const Pair<float> low = gradient(grads[i], gates[i], ups[i]);
      const Pair<float> high = gradient(grads[i + 1], gates[i + 1], ups[i + 1]);
      round_to(results[0], i / 2, low.first, high.first);
      round_to(results[1], i / 2, low.second, high.second);
    }
  }
};

template <class T, class Act>
Status launch(const QuantizeGated& p, cudaStream_t stream) {
  if (p.grad == nullptr) return launch_rows_of<true>(FromGate<T, Act>(p), p.result, stream);
  if constexpr (sizeof(T) == 2) {
    return launch_tiles_of<Scales::rows, true, true>(FromGateGradient<T, Act>(p), p.result, stream);
  } else {
    return {"gradients in float32 have no kernel"};
  }
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
  if (!in_vectors(p.gate, p.gate_stride) || !in_vectors(p.up, p.up_stride) ||
      !device::aligned(to.data, kLane) || (to.transposed != nullptr) != backward)
    return false;
  if (!backward) return true;
  return to.dtype != Dtype::float32 && in_vectors(p.grad, p.grad_stride) &&
         columns % kScaledElements == 0 && to.rows % device::kVectorBytes == 0 &&
         device::aligned(to.transposed) &&
         fp8::kTileBytes<fp8::FromGateGradient<__half, Silu>> <=
             device::current_device().shared_bytes;
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
