#pragma once

// What both ways to a gradient of norms need.

#include "detail/rowwise/tile.cuh"
#include "torchkiln/kernels/norm.h"

namespace torchkiln::cuda {

using namespace device;
using namespace rowwise;
namespace {

// A thread's vectors of a row. The sums of their columns stay in registers: twice 32 of them in
// half precision.
constexpr int kItems = 4;

/// What grad is multiplied by before it reaches a normalized element.
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

/// The same, of a type that is looked up: by what reads the weight once, or long rows.
template <class Access, class C, int kLanes>
__device__ __forceinline__ void load_any_weight(const NormBackward& p, const Access& access,
                                                int column, C (&values)[kLanes]) {
  with_parameter_type<typename Access::T>(p.weight_dtype, [&](auto tag) {
    load_weight<typename decltype(tag)::type>(p, access, column, values);
  });
}

size_t sum_bytes(const NormBackward& p) { return p.dtype == Dtype::float64 ? 8 : 4; }

}  // namespace
}  // namespace torchkiln::cuda
