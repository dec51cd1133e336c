#pragma once

// Common to both kernels of the forward pass: weight and bias.

#include "detail/rowwise/tile.cuh"
#include "torchkiln/kernels/norm.h"

namespace torchkiln::cuda {

using namespace device;
using namespace rowwise;
namespace {

/// Loads weight + weight_offset and bias with their type selected at run time. `source` is a tile,
/// and `at` an item of it, or a RowVectors, and `at` the column of a vector.
template <class Source, class C, int kLanes>
__device__ __forceinline__ void load_affine(const Norm& p, const Source& source, int at,
                                            C (&weight)[kLanes], C (&bias)[kLanes]) {
#pragma unroll
  for (int i = 0; i < kLanes; ++i) {
    weight[i] = C(1);
    bias[i] = C(0);
  }
  with_parameter_type<typename Source::T>(p.weight_dtype, [&](auto tag) {
    using W = typename decltype(tag)::type;
    if (p.weight != nullptr) {
      source.load_parameters(at, static_cast<const W*>(p.weight), weight);
#pragma unroll
      for (int i = 0; i < kLanes; ++i) weight[i] += static_cast<C>(p.weight_offset);
    }
    if (p.bias != nullptr) source.load_parameters(at, static_cast<const W*>(p.bias), bias);
  });
}

}  // namespace
}  // namespace torchkiln::cuda
