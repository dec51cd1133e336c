#pragma once

// The offsets of rows, and the stores of results, for row sums and column sums.

#include "detail/reduce/plans.h"
#include "torchkiln/core/workspace.h"
#include "torchkiln/device/fast_divide.cuh"
#include "torchkiln/device/launch.cuh"
#include "torchkiln/device/vec.cuh"

namespace torchkiln::reduce {
using namespace device;

/// The offset of each element of a grid [outer, inner]. The grid has fewer than 2^31 elements
/// unless outer or inner is 1.
class Offsets {
 public:
  Offsets() = default;

  Offsets(int64_t outer, int64_t inner, int64_t outer_stride, int64_t inner_stride)
      : inner_(static_cast<uint32_t>(outer == 1 ? 1 : inner)),
        outer_stride_(outer == 1 ? inner_stride : outer_stride),
        inner_stride_(inner_stride) {}

  __device__ __forceinline__ int64_t operator()(int64_t index) const {
    if (inner_.divisor() == 1) return index * outer_stride_;
    const uint32_t outer = inner_.quotient(static_cast<uint32_t>(index));
    const uint32_t inner = static_cast<uint32_t>(index) - outer * inner_.divisor();
    return outer * outer_stride_ + inner * inner_stride_;
  }

 private:
  Divisor inner_;
  int64_t outer_stride_ = 0;
  int64_t inner_stride_ = 0;
};

/// Stores results: sums, divided by `divisor` and rounded once to the dtype of the output.
struct Result {
  void* out;
  Dtype dtype;
  double divisor;

  template <class C>
  __device__ __forceinline__ void store(int64_t at, C sum) const {
    const C value = sum / static_cast<C>(divisor);
    switch (dtype) {
      case Dtype::float32:
        static_cast<float*>(out)[at] = static_cast<float>(value);
        break;
      case Dtype::float64:
        static_cast<double*>(out)[at] = static_cast<double>(value);
        break;
      case Dtype::float16:
        static_cast<__half*>(out)[at] = to_half(value);
        break;
      default:
        static_cast<__nv_bfloat16*>(out)[at] = to_bfloat16(value);
    }
  }

 private:
  // Converts double directly, because a conversion by way of float rounds twice.
  static __device__ __forceinline__ __half to_half(float value) { return __float2half_rn(value); }
  static __device__ __forceinline__ __half to_half(double value) { return __double2half(value); }
  static __device__ __forceinline__ __nv_bfloat16 to_bfloat16(float value) {
    return __float2bfloat16_rn(value);
  }
  static __device__ __forceinline__ __nv_bfloat16 to_bfloat16(double value) {
    return __double2bfloat16(value);
  }
};

}  // namespace torchkiln::reduce
