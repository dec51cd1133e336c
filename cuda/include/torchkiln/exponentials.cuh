#pragma once

// Sums of exponentials, as the threads of a team gather them: relative to the largest number that
// each has seen, so that none overflows.

#include <type_traits>

#include "torchkiln/team.cuh"
#include "torchkiln/vec.cuh"

namespace torchkiln {

/// Exponentials of what is computed with to the last digit.
struct NaturalPowers {
  static constexpr double kUnit = 1;     // of an exponent, in units of 1
  static constexpr double kNatural = 1;  // 1 / kUnit
  template <class C>
  static __device__ __forceinline__ C power(C exponent) {
    return exp(exponent);
  }
};

/// Of half precision: powers of two are one instruction, and so is what brings a number to them.
struct BinaryPowers {
  static constexpr double kUnit = 1.44269502162933349609375;  // log2(e) as a float
  static constexpr double kNatural = 1 / kUnit;
  static __device__ __forceinline__ float power(float exponent) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(exponent));
    return result;
  }
};

template <class T>
using PowersFor = std::conditional_t<sizeof(T) == 2, BinaryPowers, NaturalPowers>;

/// The largest of some exponents, and the sum of powers of how far each is below it; what follows
/// is added.
template <class Powers>
struct AddPowers {
  template <class C, int N>
  static __device__ __forceinline__ void clear(C (&a)[N]) {
    Add::clear(a);
    a[0] = -C(INFINITY);
  }
  template <class C, int N>
  __device__ __forceinline__ void operator()(C (&a)[N], const C (&b)[N]) const {
    const C largest = fmax(a[0], b[0]);
    a[1] = rescaled(a[1], a[0], largest) + rescaled(b[1], b[0], largest);
    a[0] = largest;
#pragma unroll
    for (int i = 2; i < N; ++i) a[i] += b[i];
  }

  /// What exponents are measured from: 0 where there was none but -infinity.
  template <class C>
  static __device__ __forceinline__ C reference(C largest) {
    return largest == -C(INFINITY) ? C(0) : largest;
  }
  /// A sum of powers relative to `from`, relative to `to`.
  template <class C>
  static __device__ __forceinline__ C rescaled(C sum, C from, C to) {
    return from == to ? sum : sum * Powers::power(reference(from) - reference(to));
  }
};

/// The largest element of some vectors; NaN only where all are.
template <class C, class T, int N, int kItems>
__device__ __forceinline__ C largest_of(const Vec<T, N> (&items)[kItems]) {
  Vec<T, N> most = items[0];
#pragma unroll
  for (int k = 1; k < kItems; ++k) most = larger(most, items[k]);
  C lanes[N];
  widen(most, lanes);
  C largest = lanes[0];
#pragma unroll
  for (int i = 1; i < N; ++i) largest = fmax(largest, lanes[i]);
  return largest;
}

}  // namespace torchkiln
