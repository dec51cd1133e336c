#pragma once

// Sums of exponentials relative to a running maximum, so that none overflows. Each thread has its
// own maximum; a merge of two sums rescales both to the larger maximum.

#include "detail/rowwise/team.cuh"
#include "torchkiln/core/scalar_math.h"
#include "torchkiln/device/vec.cuh"

namespace torchkiln::rowwise {
using namespace device;

/// Operator over arrays {maximum, sum of exp(x - maximum), further sums...}.
template <class Math>
struct SumOfExponentials {
  template <class C, int N>
  static __device__ __forceinline__ void clear(C (&a)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) a[i] = C(0);
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

  /// The number that is subtracted from exponents: the maximum, or 0 if that is -infinity.
  template <class C>
  static __device__ __forceinline__ C reference(C largest) {
    return largest == -C(INFINITY) ? C(0) : largest;
  }
  /// Converts a sum of exponentials relative to `from` into one relative to `to`. A sum relative to
  /// -infinity is returned unchanged: all of its terms are 0.
  template <class C>
  static __device__ __forceinline__ C rescaled(C sum, C from, C to) {
    return from == to || from == -C(INFINITY) ? sum : sum * Math::exp(from - reference(to));
  }
};

/// The largest element of all vectors; NaN only if all elements are NaN.
template <class C, class T, int N, int kItems>
__device__ __forceinline__ C max_of(const Vec<T, N> (&items)[kItems]) {
  Vec<T, N> most = items[0];
#pragma unroll
  for (int k = 1; k < kItems; ++k) most = elementwise_max(most, items[k]);
  C lanes[N];
  widen(most, lanes);
  C largest = lanes[0];
#pragma unroll
  for (int i = 1; i < N; ++i) largest = fmax(largest, lanes[i]);
  return largest;
}

}  // namespace torchkiln::rowwise
