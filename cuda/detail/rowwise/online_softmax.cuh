#pragma once

// Sums of exponentials, as the threads of a team gather them: relative to the largest number that
// each has seen, so that none overflows.

#include "detail/rowwise/team.cuh"
#include "torchkiln/core/scalar_math.h"
#include "torchkiln/device/vec.cuh"

namespace torchkiln::rowwise {
using namespace device;

/// The largest of some numbers, and the sum of the exponentials of how far each is below it; what
/// follows is added.
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

  /// What numbers are measured from: 0 where there was none but -infinity.
  template <class C>
  static __device__ __forceinline__ C reference(C largest) {
    return largest == -C(INFINITY) ? C(0) : largest;
  }
  /// A sum of exponentials relative to `from`, relative to `to`. There is nothing in one relative
  /// to -infinity, which must not become 0 * infinity where `to` is far below zero.
  template <class C>
  static __device__ __forceinline__ C rescaled(C sum, C from, C to) {
    return from == to || from == -C(INFINITY) ? sum : sum * Math::exp(from - reference(to));
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

}  // namespace torchkiln::rowwise
