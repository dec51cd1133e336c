#pragma once

// Common to all ways to compute gradients of norms.

#include "detail/rowwise/tile.cuh"
#include "torchkiln/kernels/norm.h"

namespace torchkiln::cuda::norm_gradients {

using namespace device;
using namespace rowwise;
namespace {

// Vectors per thread. Half precision keeps 2 x 32 column sums (weight, bias) in registers.
constexpr int kItems = 4;

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

size_t sum_bytes(const NormBackward& p) { return p.dtype == Dtype::float64 ? 8 : 4; }

}  // namespace
}  // namespace torchkiln::cuda::norm_gradients
