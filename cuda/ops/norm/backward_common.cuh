#pragma once

// The weight and the formula of the gradients, for all kernels that compute gradients of norms.
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

/// The factor of a row's gradient: rstd. It is 0 for a row of a single column, whose distance to
/// its mean is always 0: fused multiply-adds would leave a rounding error of grad * weight, times
/// rstd.
template <bool kCentered, class C>
__device__ __forceinline__ C factor_of_gradient(const NormBackward& p, C rstd) {
  return kCentered && p.columns == 1 ? C(0) : rstd;
}

/// Adds an element to the sums of its column and of its row.
template <bool kCentered, class C>
__device__ __forceinline__ void accumulate(C g, C z, C weight, C mean, C rstd, C& weight_sum,
                                           C& bias_sum, C (&sums)[kCentered ? 2 : 1]) {
  const C n = (z - mean) * rstd;
  weight_sum += g * n;
  const C d = g * weight;
  sums[0] += d * n;
  if constexpr (kCentered) {
    bias_sum += g;
    sums[1] += d;
  }
}

/// Adds adjacent elements. bias_sum is not read if the norm is not centered.
template <bool kCentered, class C, int kLanes>
__device__ __forceinline__ void accumulate(const C (&g)[kLanes], const C (&z)[kLanes],
                                           const C (&weight)[kLanes], C mean, C rstd,
                                           C (&weight_sum)[kLanes], C (&bias_sum)[kLanes],
                                           C (&sums)[kCentered ? 2 : 1]) {
#pragma unroll
  for (int i = 0; i < kLanes; ++i)
    accumulate<kCentered>(g[i], z[i], weight[i], mean, rstd, weight_sum[i], bias_sum[i], sums);
}

template <class C>
struct RowFactors {
  C mean, rstd, slope, level;
};

/// The factors that all elements of a row share, and products of them. In half precision half_slope
/// saves a multiplication per element; for rows of float32, rstd^2 could overflow.
template <class C>
struct Projection {
  RowFactors<C> row;
  C scale, half_slope;
};

template <bool kCentered, class C>
__device__ __forceinline__ Projection<C> projection_of(const NormBackward& p,
                                                       const RowFactors<C>& row) {
  return {row, factor_of_gradient<kCentered>(p, row.rstd), row.rstd * row.slope};
}

/// Computes the projection from the sums of a row.
template <bool kCentered, class C>
__device__ __forceinline__ Projection<C> projection_of(const NormBackward& p, C mean, C rstd,
                                                       C inverse_columns,
                                                       const C (&sums)[kCentered ? 2 : 1]) {
  const C scale = factor_of_gradient<kCentered>(p, rstd);
  return projection_of<kCentered>(
      p, RowFactors<C>{mean, rstd, -scale * inverse_columns * sums[0],
                       kCentered ? -scale * inverse_columns * sums[kCentered ? 1 : 0] : C(0)});
}

/// Turns g, the gradient of y, into the gradient of z. T: the type of the rows.
template <class T, class C, int kLanes>
__device__ __forceinline__ void project(const Projection<C>& by, const C (&z)[kLanes],
                                        const C (&weight)[kLanes], C (&g)[kLanes]) {
#pragma unroll
  for (int i = 0; i < kLanes; ++i) {
    const C distance = z[i] - by.row.mean;
    const C projection = sizeof(T) == 2 ? distance * by.half_slope + by.row.level
                                        : distance * by.row.rstd * by.row.slope + by.row.level;
    g[i] = g[i] * weight[i] * by.scale + projection;
  }
}

/// Adds grad_sum to g.
template <class C, int kLanes>
__device__ __forceinline__ void add_lanes(const C (&other)[kLanes], C (&g)[kLanes]) {
#pragma unroll
  for (int i = 0; i < kLanes; ++i) g[i] += other[i];
}

}  // namespace
}  // namespace torchkiln::cuda::norm_gradients
