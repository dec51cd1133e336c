#pragma once

// Conversions between float32 and E4M3, and the magnitudes from which scales are computed.

#include <cuda_fp8.h>

#include "torchkiln/core/fp8.h"
#include "torchkiln/device/vec.cuh"

namespace torchkiln::fp8 {

using device::Vec;

inline constexpr uint32_t kMagnitude = 0x7fffffff;
inline constexpr uint32_t kInfinity = 0x7f800000;

/// The storage of one E4M3 element.
struct Fp8 {
  uint8_t bits;
};

__device__ __forceinline__ float widen(float value) { return value; }
__device__ __forceinline__ float widen(__half value) { return __half2float(value); }
__device__ __forceinline__ float widen(__nv_bfloat16 value) { return __bfloat162float(value); }

// From compute capability 8.9 on, a conversion is one instruction. Before, it takes dozens of
// integer instructions, which would triple the size of the kernels if they were inlined.
#if __CUDA_ARCH__ >= 890
#define TORCHKILN_FP8_CONVERSION __forceinline__
#else
#define TORCHKILN_FP8_CONVERSION inline __noinline__
#endif

/// Converts eight elements to float16, which holds each of them exactly.
__device__ TORCHKILN_FP8_CONVERSION Vec<__half, 8> to_half(const Vec<Fp8, 8>& from) {
  Vec<__half, 8> to;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint16_t bytes = reinterpret_cast<const uint16_t*>(&from)[i];
    reinterpret_cast<__half2_raw*>(&to)[i] = __nv_cvt_fp8x2_to_halfraw2(bytes, __NV_E4M3);
  }
  return to;
}

/// The larger of `most` and the magnitude of a value; NaN does not count.
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

/// Rounds two numbers of magnitudes up to 448 to E4M3, `low` into the low byte. NaN becomes 0x7f.
/// Infinity would become 448, so callers must first replace infinities by NaN.
__device__ TORCHKILN_FP8_CONVERSION uint32_t pack(float low, float high) {
  return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
}

/// NaN for infinity; other values unchanged.
__device__ __forceinline__ float without_infinity(float value) {
  return (__float_as_uint(value) & kMagnitude) == kInfinity ? __uint_as_float(kMagnitude) : value;
}

/// Rounds value(i) * reciprocal for 0 <= i < kCount to E4M3, four per word.
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

#undef TORCHKILN_FP8_CONVERSION
