#pragma once

// The factors of a rotation, and the rotation of vectors of pairs.

#include <cmath>

#include "ops/rope/choose.h"
#include "torchkiln/device/vec.cuh"

namespace torchkiln::cuda {

/// The row of a token in the tables of cos and sin; -1 if its position is outside of them.
__device__ __forceinline__ int64_t row_of(const TokenRows& p, int64_t batch, int64_t token) {
  int64_t row = token;
  if (p.positions != nullptr) {
    const int64_t at = batch * p.stride[0] + token * p.stride[1];
    row = p.are_64_bit ? static_cast<const int64_t*>(p.positions)[at]
                       : static_cast<const int32_t*>(p.positions)[at];
  }
  return 0 <= row && row < p.rows ? row : -1;
}

template <class C, int N, class S>
__device__ __forceinline__ void load_run(const S* from, int64_t step, bool in_vectors, C (&to)[N]) {
  constexpr int kEach = N < kVectorLanes<S> ? N : kVectorLanes<S>;
  if (in_vectors) {
#pragma unroll
    for (int part = 0; part < N / kEach; ++part) {
      const Vec<S, kEach> some = load_constant<kEach>(from + part * kEach);
#pragma unroll
      for (int i = 0; i < kEach; ++i) to[part * kEach + i] = convert<C>(some.lane[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = convert<C>(__ldg(from + i * step));
  }
}

template <class T, class C, int N>
__device__ __forceinline__ void load_factors(const RopeAngles& p, const RopeFactors& factors,
                                             int64_t batch, int64_t row, int64_t pair,
                                             bool in_vectors, C (&to)[N]) {
  if (row < 0) {
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = C(NAN);
    return;
  }
  const int64_t at = batch * factors.batch_stride + row * factors.row_stride + pair * p.factor_step;
  with_parameter_type<T>(p.factor_dtype, [&](auto tag) {
    using S = typename decltype(tag)::type;
    load_run(static_cast<const S*>(factors.data) + at, p.factor_step, in_vectors, to);
  });
}

/// Rotates the pair of `a` and `b`.
template <class C>
__device__ __forceinline__ void rotate(C& a, C& b, C cos, C sin) {
  // Explicit fused multiply-adds, so that every kernel rounds in the same way.
  const C rotated = fma(a, cos, -(b * sin));
  b = fma(b, cos, a * sin);
  a = rotated;
}

/// Rotates kLanes pairs: the pairs (a[i], b[i]) or, if interleaved, neighbouring elements of a,
/// then of b.
template <class C, int kLanes>
__device__ __forceinline__ void rotate(bool interleaved, C (&a)[kLanes], C (&b)[kLanes],
                                       const C (&cos)[kLanes], const C (&sin)[kLanes]) {
  if constexpr (kLanes > 1) {
    if (interleaved) {
      constexpr int kHalf = kLanes / 2;
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        rotate(a[2 * i], a[2 * i + 1], cos[i], sin[i]);
        rotate(b[2 * i], b[2 * i + 1], cos[kHalf + i], sin[kHalf + i]);
      }
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < kLanes; ++i) rotate(a[i], b[i], cos[i], sin[i]);
}

template <class C, int N>
__device__ __forceinline__ void negate(C (&values)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = -values[i];
}

}  // namespace torchkiln::cuda
