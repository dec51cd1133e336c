#pragma once

// Mean and variance of rows that several blocks share. Moments are taken around a number near the
// elements of a warp, and merged around a common mean, so that a large mean loses no digits.

#include "forward_common.cuh"

namespace torchkiln::cuda {

using namespace device;
namespace {

/// Operator over arrays {count, center, sum of (z - center)^2, sum of z - center}, where center is
/// near the mean of `count` numbers z.
struct MergeMoments {
  template <class C, int N>
  static __device__ __forceinline__ void clear(C (&a)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) a[i] = C(0);
  }
  template <class C>
  __device__ __forceinline__ void operator()(C (&a)[4], const C (&b)[4]) const {
    const C count = a[0] + b[0];
    if (count == C(0)) return;
    const C center = a[1] + (b[1] - a[1]) * (b[0] / count);
    // The distances of the common center, after rounding, from the centers of both parts.
    const C from_a = center - a[1];
    const C from_b = center - b[1];
    a[2] += from_a * (a[0] * from_a - C(2) * a[3]) + b[2] + from_b * (b[0] * from_b - C(2) * b[3]);
    a[3] += b[3] - a[0] * from_a - b[0] * from_b;
    a[1] = center;
    a[0] = count;
  }
};

/// The operator that merges the moments of a norm. For RMS norm it adds sums of squares.
template <bool kCentered>
using MomentsOp = std::conditional_t<kCentered, MergeMoments, Sum>;
template <bool kCentered>
inline constexpr int kMoments = kCentered ? 4 : 1;

/// The moments of `count` elements of the calling warp. for_own(outside, body) must call body(z)
/// for the elements of a thread. For lanes without an element it may call body(outside).
///
/// Half precision takes its moments around `near`, one of the elements, which saves a pass. If that
/// element is at distance d from the mean, the sum of squares is larger by count * d^2, but the
/// variance is at least d^2 / count: the relative error is at most about count rounding errors.
template <class T, bool kCentered, class C, class ForOwn>
__device__ __forceinline__ void moments_of_warp(C count, C near, C (&values)[kMoments<kCentered>],
                                                const ForOwn& for_own) {
  if constexpr (kCentered) {
    C center = count > C(0) ? near : C(0);
    if constexpr (sizeof(T) > 2) {
      C total[1] = {};
      for_own(C(0), [&](C z) { total[0] += z; });
      reduce_warp(total, Sum{});
      center = count > C(0) ? total[0] / count : C(0);
    }
    C moments[2] = {};
    for_own(center, [&](C z) {
      moments[0] += (z - center) * (z - center);
      moments[1] += z - center;
    });
    reduce_warp(moments, Sum{});
    values[0] = count;
    values[1] = center;
    values[2] = moments[0];
    values[3] = moments[1];
  } else {
    values[0] = C(0);
    for_own(C(0), [&](C z) { values[0] += z * z; });
    reduce_warp(values, Sum{});
  }
}

/// Mean and variance of a row. The mean is center + rest, which may have more digits than C.
template <class C>
struct RowStatistics {
  C center, rest, rstd;
};

/// Computes the statistics from the moments of a whole row.
template <bool kCentered, class C>
__device__ __forceinline__ RowStatistics<C> statistics_of(const Norm& p,
                                                          const C (&values)[kMoments<kCentered>]) {
  const C inverse_columns = C(1) / static_cast<C>(p.columns);
  RowStatistics<C> row{};
  C variance = values[0] * inverse_columns;
  if constexpr (kCentered) {
    row.center = values[1];
    row.rest = values[3] * inverse_columns;
    variance = values[2] * inverse_columns - row.rest * row.rest;
    if (variance < C(0)) variance = 0;  // negative by rounding; NaN is kept
  }
  row.rstd = rsqrt(variance + static_cast<C>(p.eps));
  return row;
}

template <class C>
__device__ __forceinline__ void store_statistics(const Norm& p, int64_t row,
                                                 const RowStatistics<C>& found) {
  if (p.centered && p.mean != nullptr) static_cast<C*>(p.mean)[row] = found.center + found.rest;
  if (p.rstd != nullptr) static_cast<C*>(p.rstd)[row] = found.rstd;
}

/// Normalizes elements of type T.
template <class T, class C, int kLanes>
__device__ __forceinline__ void normalize(const Norm& p, const RowStatistics<C>& row,
                                          const C (&weight)[kLanes], const C (&bias)[kLanes],
                                          C (&z)[kLanes]) {
#pragma unroll
  for (int i = 0; i < kLanes; ++i) z[i] = (z[i] - row.center - row.rest) * row.rstd;
  round_normalized<T>(p, z);
#pragma unroll
  for (int i = 0; i < kLanes; ++i) z[i] = z[i] * weight[i] + bias[i];
}

}  // namespace
}  // namespace torchkiln::cuda
