#pragma once

// Blocks of 128 adjacent elements of a row that adjacent lanes of a warp hold: their scale takes
// one reduction over these lanes, without shared memory.

#include "detail/fp8/cast.cuh"
#include "torchkiln/kernels/quantize.h"

namespace torchkiln::fp8 {

inline constexpr unsigned kAllLanes = 0xffffffff;

/// Whether any of these magnitudes is infinite.
template <int kCount>
__device__ __forceinline__ bool any_infinite(const float (&magnitudes)[kCount]) {
  float most = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) most = fmaxf(most, magnitudes[i]);
  return __float_as_uint(most) == kInfinity;
}

/// Replaces each value by the largest one among kLanes adjacent lanes.
template <int kLanes, int kCount>
__device__ __forceinline__ void largest_of_lanes(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2)
      values[i] = fmaxf(values[i], __shfl_xor_sync(kAllLanes, values[i], step));
  }
}

/// Rounds kItems vectors to E4M3 and calls store(k, bytes, scale) for each of them. Vector k of
/// 128 / kSide adjacent lanes is a block; elements outside of the row are 0. All lanes of a warp
/// call it.
template <class T, int kSide, int kItems, class Store>
__device__ __forceinline__ void quantize_vectors(const Vec<T, kSide> (&items)[kItems],
                                                 const Store& store) {
  float most[kItems];
  const auto measure = [&](bool only_finite) {
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      float value[kSide];
      device::widen(items[k], value);
      most[k] = 0;
#pragma unroll
      for (int i = 0; i < kSide; ++i)
        most[k] = larger(most[k], only_finite ? finite_magnitude(value[i]) : value[i]);
    }
  };
  measure(false);
  const bool infinite = __any_sync(kAllLanes, any_infinite(most));
  if (infinite) measure(true);
  largest_of_lanes<kScaledElements / kSide>(most);
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    const uint32_t exponent = fp8_scale_exponent(__float_as_uint(most[k]));
    float value[kSide];
    device::widen(items[k], value);
    store(k, pack_all<kSide>(reciprocal_of(exponent), infinite, [&](int i) { return value[i]; }),
          scale_of(exponent));
  }
}

}  // namespace torchkiln::fp8
