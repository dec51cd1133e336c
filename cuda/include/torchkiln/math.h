#pragma once

// The transcendental functions that the formulas need, for every place where they are computed:
//
//   nvcc, ExactMath  CUDA's own functions, within one or two units in the last place
//   nvcc, FastMath   the hardware's exp2 and reciprocal, for results that are stored in sixteen
//                    bits: their error is a hundredth of that rounding, and the full functions
//                    take more time than the memory
//   g++,  ExactMath  float: branch-free polynomials, which the compiler turns into wide
//                    instructions; double: the C library

#ifdef __CUDACC__
#define TORCHKILN_FUNCTION __host__ __device__ __forceinline__
#else
// Forced, because the CPU loops are compiled for several instruction sets: an out-of-line copy made
// for a wide one could be picked by the linker for all of them.
#define TORCHKILN_FUNCTION inline __attribute__((always_inline))
#endif

#ifndef __CUDACC__
#include <cmath>
#include <cstdint>
#include <cstring>
#endif

namespace torchkiln {

/// A function and its derivative.
template <class C>
struct Slope {
  C value;
  C slope;
};

inline constexpr double kRootOfHalf = 0.707106781186547524400844362105;
inline constexpr double kDensityAtZero = 0.398942280401432677939946059934;  // 1 / sqrt(2 pi)

#ifdef __CUDACC__

struct ExactMath {
  template <class C>
  TORCHKILN_FUNCTION static C exp(C x) {
    return ::exp(x);
  }
  template <class C>
  TORCHKILN_FUNCTION static C reciprocal(C x) {
    return C(1) / x;
  }
  /// The cumulative normal distribution and its density.
  template <class C>
  TORCHKILN_FUNCTION static Slope<C> normal(C x) {
    return {C(0.5) + C(0.5) * ::erf(x * C(kRootOfHalf)),
            C(kDensityAtZero) * ::exp(C(-0.5) * x * x)};
  }
  template <class C>
  TORCHKILN_FUNCTION static C gelu(C x) {
    return x * normal(x).value;
  }
  template <class C>
  TORCHKILN_FUNCTION static C tanh(C x) {
    return ::tanh(x);
  }
};

struct FastMath {
  __device__ __forceinline__ static float exp(float x) { return exp2(x * kLog2OfE); }
  /// Subnormal results included: silu multiplies them by a large number.
  __device__ __forceinline__ static float reciprocal(float x) {
    float result;
    asm("rcp.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
  }
  __device__ __forceinline__ static Slope<float> normal(float x) {
    const float power = exp2(x * x * (-0.5f * kLog2OfE));
    const float tail = power * tail_over_power(x);
    return {x < 0.0f ? tail : 1.0f - tail, static_cast<float>(kDensityAtZero) * power};
  }
  /// x times the lower tail, or x less x times the upper one; infinity stays what it is.
  __device__ __forceinline__ static float gelu(float x) {
    const float product = fminf(x, 64.0f) * (exp2(x * x * (-0.5f * kLog2OfE)) * tail_over_power(x));
    return x > 0.0f ? x - product : product;
  }
  /// 2 / (1 + e^-2x) - 1, and three terms of the series where that would cancel.
  __device__ __forceinline__ static float tanh(float x) {
    const float square = x * x;
    const float series = x * (square * (square * 0.13333333f - 0.33333333f) + 1.0f);  // -0: -0
    const float large = 2.0f * inverse(1.0f + exp2(x * (-2.0f * kLog2OfE))) - 1.0f;
    return square < 0.0625f ? series : large;
  }

 private:
  static constexpr float kLog2OfE = 1.44269504f;

  __device__ __forceinline__ static float exp2(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
  }
  /// reciprocal() where the result is not tiny.
  __device__ __forceinline__ static float inverse(float x) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
  }
  /// The upper tail of the normal distribution at |x| over e^(-x^2 / 2): a polynomial in
  /// t = 1 / (1 + 0.36 |x|), fitted to one part in 100,000 as far as half precision reaches.
  __device__ __forceinline__ static float tail_over_power(float x) {
    const float t = inverse(1.0f + 0.36f * fabsf(x));
    float p = -0.09657981f;
    p = p * t + 0.24766665f;
    p = p * t + 0.04403203f;
    p = p * t + 0.16306658f;
    p = p * t + 0.14181025f;
    return p * t;
  }
};

#else

struct ExactMath {
  TORCHKILN_FUNCTION static double exp(double x) { return std::exp(x); }
  template <class C>
  TORCHKILN_FUNCTION static C reciprocal(C x) {
    return C(1) / x;
  }
  TORCHKILN_FUNCTION static double erf(double x) { return std::erf(x); }
  TORCHKILN_FUNCTION static double tanh(double x) { return std::tanh(x); }

  /// 2^n e^r with |r| <= ln(2) / 2; n goes into the exponent in two halves, so that results below
  /// the smallest normal number come out right.
  TORCHKILN_FUNCTION static float exp(float x) {
    const float bounded = x < -104.0f ? -104.0f : x > 89.0f ? 89.0f : x;
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const float n = (bounded * 1.44269504f + kRound) - kRound;
    const float r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.3950486e-3f;
    p = p * r + 8.3688879e-3f;
    p = p * r + 4.1666206e-2f;
    p = p * r + 1.6666519e-1f;
    p = p * r + 5.0000001e-1f;
    p = p * (r * r) + r + 1.0f;
    const int32_t whole = static_cast<int32_t>(n);
    const int32_t half = whole >> 1;
    return p * power_of_two(half) * power_of_two(whole - half);
  }

  /// x P(x^2) below 0.9; above, 1 - e^Q(x), where Q is the logarithm of erfc.
  TORCHKILN_FUNCTION static float erf(float x) {
    const float size = x < 0.0f ? -x : x;
    const float s = x * x;
    float p = 8.3695766e-5f;
    p = p * s - 8.1425806e-4f;
    p = p * s + 5.2010214e-3f;
    p = p * s - 2.6859394e-2f;
    p = p * s + 1.1283695e-1f;
    p = p * s - 3.7612634e-1f;
    p = p * s + 1.1283792f;
    const float t = size > 4.0f ? 4.0f : size;
    float q = -2.0828618e-5f;
    q = q * t + 4.3139356e-4f;
    q = q * t - 4.1562549e-3f;
    q = q * t + 2.5080616e-2f;
    q = q * t - 1.0822038e-1f;
    q = q * t - 6.3340085e-1f;
    q = q * t - 1.1294884f;
    q = q * t + 1.6920512e-4f;
    const float tail = 1.0f - exp(q);
    return size < 0.9f ? x * p : x < 0.0f ? -tail : tail;
  }

  /// The cumulative normal distribution and its density.
  template <class C>
  TORCHKILN_FUNCTION static Slope<C> normal(C x) {
    return {C(0.5) + C(0.5) * erf(x * C(kRootOfHalf)), C(kDensityAtZero) * exp(C(-0.5) * x * x)};
  }

  template <class C>
  TORCHKILN_FUNCTION static C gelu(C x) {
    return x * normal(x).value;
  }

  /// x (1 + x^2 P(x^2)) below 0.6; above, 1 - 2 / (e^2x + 1).
  TORCHKILN_FUNCTION static float tanh(float x) {
    const float size = x < 0.0f ? -x : x;
    const float s = x * x;
    float p = -5.9058606e-3f;
    p = p * s + 2.0805378e-2f;
    p = p * s - 5.3786681e-2f;
    p = p * s + 1.3331958e-1f;
    p = p * s - 3.3333299e-1f;
    const float large = 1.0f - 2.0f / (exp(size + size) + 1.0f);
    return size < 0.6f ? x * (s * p + 1.0f) : x < 0.0f ? -large : large;  // -0 stays -0
  }

 private:
  TORCHKILN_FUNCTION static float power_of_two(int32_t n) {
    const int32_t bits = (n + 127) << 23;
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }
};

#endif

/// 1 / (1 + e^-x)
template <class Math, class C>
TORCHKILN_FUNCTION C sigmoid(C x) {
  return Math::reciprocal(C(1) + Math::exp(-x));
}

/// The same and its derivative s (1 - s), which is taken from e^-|x|: 1 - s would cancel.
template <class Math, class C>
TORCHKILN_FUNCTION Slope<C> sigmoid_and_slope(C x) {
  const C e = Math::exp(x < C(0) ? x : -x);
  const C r = Math::reciprocal(C(1) + e);
  const C s = x < C(0) ? e * r : r;
  return {s, e * r * r};
}

}  // namespace torchkiln
