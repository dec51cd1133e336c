#pragma once

// Functions that several kernels of the forward pass share.

#include "detail/rowwise/tile.cuh"
#include "torchkiln/kernels/norm.h"

namespace torchkiln::cuda {

using namespace device;
using namespace rowwise;
namespace {

/// Rounds normalized elements to T before the weight is applied, if p.rounds_normalized.
template <class T, class C, int kLanes>
__device__ __forceinline__ void round_normalized(const Norm& p, C (&n)[kLanes]) {
  if constexpr (sizeof(T) < sizeof(C)) {
    if (!p.rounds_normalized) return;
#pragma unroll
    for (int i = 0; i < kLanes; ++i) n[i] = convert<C>(convert<T>(n[i]));
  }
}

/// Calls body(pointer to the row of the residual). The residual has type T or, if T is float32,
/// possibly half precision.
template <class T, class Body>
__device__ __forceinline__ void with_residual(const Norm& p, int64_t row, const Body& body) {
  const int64_t begin = row * p.residual_row_stride;
  if constexpr (sizeof(T) == 4) {
    if (p.residual_dtype == Dtype::float16)
      return body(static_cast<const __half*>(p.residual) + begin);
    if (p.residual_dtype == Dtype::bfloat16)
      return body(static_cast<const __nv_bfloat16*>(p.residual) + begin);
  }
  body(static_cast<const T*>(p.residual) + begin);
}

/// Loads weight + weight_offset and bias of item k, with their type selected at run time.
template <class Tile, class C, int kLanes>
__device__ __forceinline__ void load_affine(const Norm& p, const Tile& tile, int k,
                                            C (&weight)[kLanes], C (&bias)[kLanes]) {
#pragma unroll
  for (int i = 0; i < kLanes; ++i) {
    weight[i] = C(1);
    bias[i] = C(0);
  }
  with_parameter_type<typename Tile::T>(p.weight_dtype, [&](auto tag) {
    using W = typename decltype(tag)::type;
    if (p.weight != nullptr) {
      tile.load_parameters(k, static_cast<const W*>(p.weight), weight);
#pragma unroll
      for (int i = 0; i < kLanes; ++i) weight[i] += static_cast<C>(p.weight_offset);
    }
    if (p.bias != nullptr) tile.load_parameters(k, static_cast<const W*>(p.bias), bias);
  });
}

}  // namespace
}  // namespace torchkiln::cuda
