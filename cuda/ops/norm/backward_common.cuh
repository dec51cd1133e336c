#pragma once

// Common to all ways to compute gradients of norms: the weight, and the formula of the gradients.
//
//   n = (z - mean) * rstd, d = grad * weight
//   weight_sum[column] += grad * n, bias_sum[column] += grad       accumulate()
//   sums of d * n and of d over the row                            accumulate()
//   grad_x = grad * weight * scale + (z - mean) * rstd * slope + level        project()

#include "detail/rowwise/tile.cuh"
#include "launch.cuh"

namespace torchkiln::cuda::norm_gradients {

using namespace device;
using namespace rowwise;
namespace {

/// Loads the factor of grad in a normalized element's gradient: weight + weight_offset, 0 outside
/// of the row.
template <class W, class Access, class C, int kLanes>
__device__ __forceinline__ void load_weight(const NormBackward& p, const Access& access, int column,
                                            C (&values)[kLanes]) {
#pragma unroll
  for (int i = 0; i < kLanes; ++i) values[i] = access.has(column, i) ? C(1) : C(0);
  if (p.weight == nullptr) return;
  access.load_parameters(column, static_cast<const W*>(p.weight), values);
#pragma unroll
  for (int i = 0; i < kLanes; ++i) values[i] += static_cast<C>(p.weight_offset);
}

/// load_weight() with the type of the weight selected at run time, for kernels that read it once or
/// have long rows.
template <class Access, class C, int kLanes>
__device__ __forceinline__ void load_any_weight(const NormBackward& p, const Access& access,
                                                int column, C (&values)[kLanes]) {
  with_parameter_type<typename Access::T>(p.weight_dtype, [&](auto tag) {
    load_weight<typename decltype(tag)::type>(p, access, column, values);
  });
}

/// The factor of a row's gradient: rstd, but 0 for a single column, whose distance to its mean is
/// always 0. Multiply-adds would leave a rounding error of grad * weight, times rstd.
template <bool kCentered, class C>
__device__ __forceinline__ C factor_of_gradient(const NormBackward& p, C rstd) {
  return kCentered && p.columns == 1 ? C(0) : rstd;
}

/// Adds elements to the sums of their columns and of their row. bias_sum is not read if the norm is
/// not centered.
template <bool kCentered, class C, int kLanes>
__device__ __forceinline__ void accumulate(const C (&g)[kLanes], const C (&z)[kLanes],
                                           const C (&weight)[kLanes], C mean, C rstd,
                                           C (&weight_sum)[kLanes], C (&bias_sum)[kLanes],
                                           C (&sums)[kCentered ? 2 : 1]) {
#pragma unroll
  for (int i = 0; i < kLanes; ++i) {
    const C n = (z[i] - mean) * rstd;
    weight_sum[i] += g[i] * n;
    const C d = g[i] * weight[i];
    sums[0] += d * n;
    if constexpr (kCentered) {
      bias_sum[i] += g[i];
      sums[1] += d;
    }
  }
}

template <class C>
struct RowFactors {
  C mean, rstd, slope, level;
};

/// The factors of a row, from its sums.
template <bool kCentered, class C>
__device__ __forceinline__ RowFactors<C> factors_of(const NormBackward& p, C mean, C rstd,
                                                    C inverse_columns,
                                                    const C (&sums)[kCentered ? 2 : 1]) {
  const C scale = factor_of_gradient<kCentered>(p, rstd);
  return {mean, rstd, -scale * inverse_columns * sums[0],
          kCentered ? -scale * inverse_columns * sums[kCentered ? 1 : 0] : C(0)};
}

/// Turns g from the gradient of y into that of z. T: the type of the rows.
template <class T, bool kCentered, class C, int kLanes>
__device__ __forceinline__ void project(const NormBackward& p, const RowFactors<C>& row,
                                        const C (&z)[kLanes], const C (&weight)[kLanes],
                                        C (&g)[kLanes]) {
  const C scale = factor_of_gradient<kCentered>(p, row.rstd);
  // Half precision saves a product per element. With rows of float32, rstd^2 could overflow.
  const C half_slope = row.rstd * row.slope;
#pragma unroll
  for (int i = 0; i < kLanes; ++i) {
    const C distance = z[i] - row.mean;
    const C projection = sizeof(T) == 2 ? distance * half_slope + row.level
                                        : distance * row.rstd * row.slope + row.level;
    g[i] = g[i] * weight[i] * scale + projection;
  }
}

/// Adds the gradient of the sum.
template <class C, int kLanes>
__device__ __forceinline__ void add_lanes(const C (&other)[kLanes], C (&g)[kLanes]) {
#pragma unroll
  for (int i = 0; i < kLanes; ++i) g[i] += other[i];
}

}  // namespace
}  // namespace torchkiln::cuda::norm_gradients
