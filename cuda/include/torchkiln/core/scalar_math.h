#pragma once

// The transcendental functions that formulas use, for each compiler:
//
//   nvcc, ExactMath  CUDA's functions, accurate to 1 or 2 units in the last place
//   nvcc, FastMath   the hardware's exp2 and reciprocal, for results that are stored in 16 bits.
//                    Their error is a hundredth of that rounding, whereas the full functions would
//                    take longer than the memory accesses
//   g++,  ExactMath  float: branch-free polynomials, which the compiler vectorises;
//                    double: the C library, and a series for exp

#ifdef __CUDACC__
#define TORCHKILN_FUNCTION __host__ __device__ __forceinline__
#else
// Forced inlining: the CPU loops are compiled for several instruction sets, and the linker could
// use one out-of-line copy, compiled for a wide instruction set, for all of them.
#define TORCHKILN_FUNCTION inline __attribute__((always_inline))
#endif

#ifdef __CUDACC__
#include <type_traits>
#else
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

/// The upper tail of the normal distribution at |x|: root^2 * polynomial * t. The factor
/// e^(-x^2 / 2) is applied as its square root, twice, because it underflows where its product with
/// |x| is not yet 0.
struct NormalTail {
  float root;        // e^(-x^2 / 4)
  float polynomial;  // polynomial * t: the tail divided by e^(-x^2 / 2)
  float t;
};

/// The tail at |x|, with t = 1 / (1 + 0.35 |x|) and a polynomial in t. The error of polynomial * t
/// is below 1.7e-7 of the difference polynomial * t - |x| / sqrt(2 pi), a factor of gelu's
/// derivative, wherever this difference is not near 0.
template <class Math>
TORCHKILN_FUNCTION NormalTail normal_tail(float x) {
  const float t = Math::inverse(1.0f + 0.35f * (x < 0.0f ? -x : x));
  float p = 0.0450796410f;
  p = p * t - 0.185933307f;
  p = p * t + 0.212833866f;
  p = p * t + 0.00815031398f;
  p = p * t + 0.143136889f;
  p = p * t + 0.136975557f;
  p = p * t + 0.139757127f;
  return {Math::exp_or_zero(-0.25f * x * x), p, t};
}

#ifdef __CUDACC__

/// Functions in float64 are not inlined: repeated for every element that a thread has in flight,
/// they would double the machine code of kernels with activations.
namespace called {
static __host__ __device__ __noinline__ double exp(double x) { return ::exp(x); }
static __host__ __device__ __noinline__ double erf(double x) { return ::erf(x); }
static __host__ __device__ __noinline__ double tanh(double x) { return ::tanh(x); }
}  // namespace called

struct ExactMath {
  TORCHKILN_FUNCTION static float exp(float x) { return ::exp(x); }
  TORCHKILN_FUNCTION static double exp(double x) { return called::exp(x); }
  /// exp() for arguments up to 88. Where the true result is subnormal, it may return 0.
  template <class C>
  TORCHKILN_FUNCTION static C exp_or_zero(C x) {
    return exp(x);
  }
  template <class C>
  TORCHKILN_FUNCTION static C reciprocal(C x) {
    return C(1) / x;
  }
  /// reciprocal() for arguments whose result is not subnormal.
  template <class C>
  TORCHKILN_FUNCTION static C inverse(C x) {
    return C(1) / x;
  }
  template <class C>
  TORCHKILN_FUNCTION static C gelu(C x) {
    return x * (C(0.5) + C(0.5) * erf(x * C(kRootOfHalf)));
  }
  TORCHKILN_FUNCTION static float tanh(float x) { return ::tanh(x); }
  TORCHKILN_FUNCTION static double tanh(double x) { return called::tanh(x); }
  TORCHKILN_FUNCTION static float erf(float x) { return ::erf(x); }
  TORCHKILN_FUNCTION static double erf(double x) { return called::erf(x); }
};

struct FastMath {
  __device__ __forceinline__ static float exp(float x) { return exp2(x * kLog2OfE); }
  __device__ __forceinline__ static float exp_or_zero(float x) { return exp(x); }
  /// Keeps subnormal results, because silu multiplies them by a large number.
  __device__ __forceinline__ static float reciprocal(float x) {
    float result;
    asm("rcp.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
  }
  /// reciprocal() for arguments whose result is not subnormal.
  __device__ __forceinline__ static float inverse(float x) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
  }
  /// The upper tail is e^(-x^2 / 2) times a polynomial in t = 1 / (1 + 0.36 |x|), fitted to a
  /// relative error of 1e-5 over the range of half precision: far below zero the tail alone
  /// determines the result.
  __device__ __forceinline__ static float gelu(float x) {
    const float t = inverse(1.0f + 0.36f * fabsf(x));
    float p = -0.09657981f;
    p = p * t + 0.24766665f;
    p = p * t + 0.04403203f;
    p = p * t + 0.16306658f;
    p = p * t + 0.14181025f;
    const float tail = exp2(x * x * (-0.5f * kLog2OfE)) * (p * t);
    return x * (x > 0.0f ? 1.0f - tail : tail);
  }
  /// 2 / (1 + e^-2x) - 1. Near 0, where the difference cancels, three terms of the series.
  __device__ __forceinline__ static float tanh(float x) {
    const float square = x * x;
    const float series = x * (square * (square * 0.13333333f - 0.33333333f) + 1.0f);  // keeps -0
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
};

/// The math for results that are stored as Out.
template <class Out>
using MathFor = std::conditional_t<sizeof(Out) == 2, FastMath, ExactMath>;

#else

struct ExactMath {
  template <class C>
  TORCHKILN_FUNCTION static C reciprocal(C x) {
    return C(1) / x;
  }
  template <class C>
  TORCHKILN_FUNCTION static C inverse(C x) {
    return C(1) / x;
  }
  TORCHKILN_FUNCTION static double erf(double x) { return std::erf(x); }
  TORCHKILN_FUNCTION static double tanh(double x) { return std::tanh(x); }

  /// 2^n e^r with |r| <= ln(2) / 2. n is applied to the exponent in two halves, so that subnormal
  /// results are correct.
  TORCHKILN_FUNCTION static float exp(float x) {
    const float bounded = x < -104.0f ? -104.0f : x > 89.0f ? 89.0f : x;
    // Adding 1.5 * 2^23 rounds x log2(e) to an integer n. The bits of the sum, less those of
    // 1.5 * 2^23, are n. A conversion from float to integer would be undefined for NaN.
    constexpr float kRound = 12582912.0f;
    constexpr int32_t kRoundBits = 0x4b400000;
    const float shifted = bounded * 1.44269504f + kRound;
    const float p = exp_of_rest(bounded, shifted - kRound);
    int32_t whole;
    std::memcpy(&whole, &shifted, sizeof(whole));
    whole -= kRoundBits;
    const int32_t half = whole >> 1;
    return p * power_of_two(half) * power_of_two(whole - half);
  }

  /// exp() for arguments up to 88, in two thirds of the time. Results below the smallest normal
  /// number are 0: there the biased exponent n + 127 is 0, so its bits can be used as they are.
  TORCHKILN_FUNCTION static float exp_or_zero(float x) {
    const float bounded = x < -88.0f ? -88.0f : x;
    constexpr float kRound = 12582912.0f + 127.0f;
    const float shifted = bounded * 1.44269504f + kRound;
    return exp_of_rest(bounded, shifted - kRound) * shifted_into_exponent(shifted);
  }
  TORCHKILN_FUNCTION static double exp_or_zero(double x) { return exp(x); }

  /// exp() of double, by the same method with a series up to the 13th power. Does not call the C
  /// library's exp(), whose symbol version needs a newer glibc than wheels may require.
  TORCHKILN_FUNCTION static double exp(double x) {
    const double bounded = x < -746.0 ? -746.0 : x > 710.0 ? 710.0 : x;
    constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52
    constexpr int64_t kRoundBits = 0x4338000000000000;
    const double shifted = bounded * 1.4426950408889634 + kRound;
    const double n = shifted - kRound;
    const double r = (bounded - n * 0.693147180369123816490) - n * 1.90821492927058770002e-10;
    double p = 1.0 / 6227020800.0;
    p = p * r + 1.0 / 479001600.0;
    p = p * r + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * (r * r) + r + 1.0;
    int64_t whole;
    std::memcpy(&whole, &shifted, sizeof(whole));
    whole -= kRoundBits;
    const int64_t half = whole >> 1;
    return p * power_of_two(half) * power_of_two(whole - half);
  }

  /// max(x, 0) - |x| tail, where the tail is e^(-x^2 / 2) times a quotient of polynomials in |x|,
  /// fitted to a relative error of 6e-8 (1 + x^2 / 2), as the exponent's rounding error grows. The
  /// power is scaled by 2^24, so that it is normal wherever the result is not 0. The first
  /// coefficient of d and p is 1, which saves a multiplication each and makes n / d * p 2^11 times
  /// as large. The last product takes out both powers of two without rounding. From 14.45 on the
  /// power is 0, and its product with infinity is NaN below 0, as in torch.
  TORCHKILN_FUNCTION static float gelu(float x) {
    const float absolute = std::fabs(x);
    const float size = absolute < 14.46f ? absolute : 14.46f;
    float n = 1.08342552f;
    n = n * size + 8.12592411f;
    n = n * size + 25.6542625f;
    n = n * size + 37.4276848f;
    float d = size + 7.4873929f;
    d = d * size + 24.8176842f;
    d = d * size + 40.8726273f;
    d = d * size + 27.5549011f;
    // 2^(-x^2 log2(e) / 2), as in exp_or_zero(). With a fused multiply-add the product is not
    // rounded.
    const float factor = size * -0.72134752f;
    constexpr float kRound = 12582912.0f + 127.0f + 24.0f;
    const float shifted = factor * size + kRound;
    const float r = factor * size - (shifted - kRound);
    float p = r + 7.29130077f;
    p = p * r + 41.8462296f;
    p = p * r + 181.100372f;
    p = p * r + 522.554016f;
    p = p * r + 753.88623f;
    const float power = p * shifted_into_exponent(shifted);
    const float distance = -x > size ? -x : size;
    return (-0.0f > x ? -0.0f : x) - (distance * n / d * power) * 0x1p-35f;
  }
  /// As gelu() of float, with the quotient fitted to a relative error of 5e-17. From 38.7 on the
  /// power is 0.
  TORCHKILN_FUNCTION static double gelu(double x) {
    const double absolute = std::fabs(x);
    const double size = absolute < 38.7 ? absolute : 38.7;
    double n = 1.382081541117008e-06;
    n = n * size + 3.717295463433695e-05;
    n = n * size + 0.000489523877366307;
    n = n * size + 0.004083137997463847;
    n = n * size + 0.02359335936029376;
    n = n * size + 0.09760423315460295;
    n = n * size + 0.2891207475068366;
    n = n * size + 0.5937496591254998;
    n = n * size + 0.7746692424538267;
    n = n * size + 0.5;
    double d = 3.464364668820093e-06;
    d = d * size + 9.317877913581589e-05;
    d = d * size + 0.0012305187569857587;
    d = d * size + 0.01032808792141104;
    d = d * size + 0.06035990776071871;
    d = d * size + 0.25470607027907094;
    d = d * size + 0.781438803648254;
    d = d * size + 1.7134251850734694;
    d = d * size + 2.5603123471844103;
    d = d * size + 2.3472230457105088;
    d = d * size + 1.0;
    const double distance = -x > size ? -x : size;
    return (-0.0 > x ? -0.0 : x) - distance * n / d * exp(-0.5 * size * size);
  }

  /// x (1 + x^2 P(x^2)) for |x| < 0.6, otherwise 1 - 2 / (e^2|x| + 1) with the sign of x.
  TORCHKILN_FUNCTION static float tanh(float x) {
    const float size = x < 0.0f ? -x : x;
    const float s = x * x;
    float p = -5.9058606e-3f;
    p = p * s + 2.0805378e-2f;
    p = p * s - 5.3786681e-2f;
    p = p * s + 1.3331958e-1f;
    p = p * s - 3.3333299e-1f;
    const float large = 1.0f - 2.0f / (exp(size + size) + 1.0f);
    return size < 0.6f ? x * (s * p + 1.0f) : x < 0.0f ? -large : large;  // keeps -0
  }

 private:
  /// e^(x - n ln(2)). The result is between the square roots of 1/2 and of 2.
  TORCHKILN_FUNCTION static float exp_of_rest(float x, float n) {
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.3950486e-3f;
    p = p * r + 8.3688879e-3f;
    p = p * r + 4.1666206e-2f;
    p = p * r + 1.6666519e-1f;
    p = p * r + 5.0000001e-1f;
    return p * (r * r) + r + 1.0f;
  }
  /// The power of two whose biased exponent is in the lowest bits of `shifted`. The caller has
  /// added a large constant, which moves a number to these bits.
  TORCHKILN_FUNCTION static float shifted_into_exponent(float shifted) {
    uint32_t bits;
    std::memcpy(&bits, &shifted, sizeof(bits));
    bits <<= 23;
    float power;
    std::memcpy(&power, &bits, sizeof(power));
    return power;
  }
  TORCHKILN_FUNCTION static float power_of_two(int32_t n) {
    const uint32_t bits = static_cast<uint32_t>(n + 127) << 23;
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }
  TORCHKILN_FUNCTION static double power_of_two(int64_t n) {
    const uint64_t bits = static_cast<uint64_t>(n + 1023) << 52;
    double value;
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

/// sigmoid(x) = s and its derivative s (1 - s), computed from e^-|x| because 1 - s would cancel.
template <class Math, class C>
TORCHKILN_FUNCTION Slope<C> sigmoid_and_slope(C x) {
  const C e = Math::exp(x < C(0) ? x : -x);
  const C r = Math::inverse(C(1) + e);
  const C s = x < C(0) ? e * r : r;
  return {s, e * r * r};
}

/// silu(z) = z s(z) and its derivative s + z s (1 - s), with s the sigmoid, from one exponential.
/// Where e^z underflows, the derivative is 0.
template <class Math, class C>
TORCHKILN_FUNCTION Slope<C> silu_and_slope(C z) {
  const Slope<C> sigmoid = sigmoid_and_slope<Math>(z);
  return {z * sigmoid.value, sigmoid.value + z * sigmoid.slope};
}

/// The derivative of z s(a(z)), with s the sigmoid and a(z) odd and increasing: `a` is a(|z|),
/// `slope` is a'(z).
///
/// For z < 0 this is e^-a r (1 - |z| a' r) with r = 1 / (1 + e^-a), for z > 0 it is 1 minus that.
/// The factor e^-a is applied as its square root, twice, because it underflows where its product
/// with |z| is not yet 0. The root multiplies `slope` first, so that |z| a' does not overflow.
template <class Math, class C>
TORCHKILN_FUNCTION C sigmoid_gate_slope(C z, C a, C slope) {
  const C size = z < C(0) ? -z : z;
  const C root = Math::exp_or_zero(C(-0.5) * a);
  const C r = Math::inverse(C(1) + root * root);
  const C below = root * r * (root - size * (root * slope * r));
  return z < C(0) ? below : C(1) - below;
}

/// a * b - c, on a CPU with one rounding where it has an instruction for that. If c is a product,
/// too, g++ fuses one product in a vector loop and the other one in its remainder, so that results
/// would depend on the number of threads.
TORCHKILN_FUNCTION float product_minus(float a, float b, float c) {
#if defined(__FP_FAST_FMAF) && !defined(__CUDACC__)
  return __builtin_fmaf(a, b, -c);
#else
  return a * b - c;
#endif
}

/// The derivative of z F(z), with F the cumulative normal distribution.
template <class Math>
TORCHKILN_FUNCTION float gelu_slope(float z) {
  const NormalTail tail = normal_tail<Math>(z);
  const float size = z < 0.0f ? -z : z;
  const float density = static_cast<float>(kDensityAtZero) * size;
  const float below = tail.root * (tail.root * product_minus(tail.polynomial, tail.t, density));
  return z < 0.0f ? below : 1.0f - below;
}

template <class Math>
TORCHKILN_FUNCTION double gelu_slope(double z) {
  const double density = kDensityAtZero * Math::exp(-0.5 * z * z);
  return 0.5 + 0.5 * Math::erf(z * kRootOfHalf) + z * density;
}

}  // namespace torchkiln
