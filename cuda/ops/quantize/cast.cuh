#pragma once

// Conversions between float32 and E4M3, and the magnitudes that scales are computed from.

#include "torchkiln/core/fp8.h"
#include "torchkiln/device/vec.cuh"

namespace torchkiln::fp8 {

using device::Vec;

inline constexpr uint32_t kMagnitude = 0x7fffffff;
inline constexpr uint32_t kInfinity = 0x7f800000;

/// An E4M3 element of a source.
struct Fp8 {
  uint8_t bits;
};

__device__ __forceinline__ float widen(float value) { return value; }
__device__ __forceinline__ float widen(__half value) { return __half2float(value); }
__device__ __forceinline__ float widen(__nv_bfloat16 value) { return __bfloat162float(value); }

/// Converts eight elements to float16, which holds each of them exactly.
__device__ __forceinline__ Vec<__half, 8> to_half(const Vec<Fp8, 8>& from) {
  Vec<__half, 8> to;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t pair = 0;
#if __CUDA_ARCH__ >= 890
    const uint16_t bytes = reinterpret_cast<const uint16_t*>(&from)[i];
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(bytes));
#endif
    reinterpret_cast<uint32_t*>(&to)[i] = pair;
  }
  return to;
}

/// The larger of a magnitude seen so far and that of a value; NaN does not count.
__device__ __forceinline__ float larger(float most, float value) {
  return fmaxf(most, fabsf(value));
}

/// The magnitude of a finite value; 0 for others.
__device__ __forceinline__ float finite_magnitude(float value) {
  const float magnitude = fabsf(value);
  return __float_as_uint(magnitude) < kInfinity ? magnitude : 0.0f;
}

__device__ __forceinline__ float scale_of(uint32_t exponent) {
  return __uint_as_float(fp8_scale_bits(exponent));
}
__device__ __forceinline__ float reciprocal_of(uint32_t exponent) {
  return __uint_as_float(fp8_reciprocal_bits(exponent));
}

/// Rounds two numbers of magnitudes up to 448 to E4M3, `low` into the low byte. NaN becomes 0x7f.
/// The instruction would store infinity as 448, so that a caller with `any` infinite number sets
/// those to NaN first.
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint16_t packed = 0;
#if __CUDA_ARCH__ >= 890
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
#endif
  return packed;
}

/// NaN for infinity; other values unchanged.
__device__ __forceinline__ float without_infinity(float value) {
  return (__float_as_uint(value) & kMagnitude) == kInfinity ? __uint_as_float(kMagnitude) : value;
}

/// Rounds value(i) * reciprocal for 0 <= i < kCount to bytes.
template <int kCount, class Value>
__device__ __forceinline__ Vec<uint32_t, kCount / 4> pack_all(float reciprocal, bool infinite,
                                                              const Value& value) {
  Vec<uint32_t, kCount / 4> packed;
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    float each[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      each[j] = value(i + j) * reciprocal;
      if (infinite) each[j] = without_infinity(each[j]);
    }
    packed.lane[i / 4] = pack(each[0], each[1]) | pack(each[2], each[3]) << 16;
  }
  return packed;
}

}  // namespace torchkiln::fp8
