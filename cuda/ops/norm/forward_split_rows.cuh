#pragma once

// Rows that are split among blocks: where they are, their elements and parameters, and how moments
// of their parts are merged.

#include "detail/rowwise/inner_vectors.cuh"
#include "forward_common.cuh"

namespace torchkiln::cuda {

using namespace device;
using namespace rowwise;
namespace {

/// Where a row is. A row that does not exist has no elements.
template <class T>
struct NormRow {
  const T* x;
  const T* residual;  // null: there is none, or of another type
  int64_t index;
  InnerVectors<T> vectors;  // of y
};

/// N adjacent elements of z = x + residual, in flight until read().
template <class T, int N>
struct PendingSum {
  PendingElements<T, N> x, residual;

  __device__ __forceinline__ void load(const NormRow<T>& row, int column) {
    x.load(row.x + column);
    if (row.residual != nullptr) residual.load(row.residual + column);
  }
  template <class C>
  __device__ __forceinline__ void read(const Norm& p, const NormRow<T>& row, int column,
                                       C (&z)[N]) const {
    x.read(z);
    if (p.residual == nullptr) return;
    C other[N];
    if (row.residual != nullptr) {
      residual.read(other);
    } else {
      with_residual<T>(p, row.index, [&](auto* from) { load_elements(from + column, other); });
    }
#pragma unroll
    for (int i = 0; i < N; ++i) z[i] = convert<C>(convert<T>(z[i] + other[i]));
  }
};

/// Loads weight + weight_offset and bias of adjacent columns.
template <class T, class C, int N>
__device__ __forceinline__ void load_parameters(const Norm& p, int column, C (&weight)[N],
                                                C (&bias)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    weight[i] = C(1);
    bias[i] = C(0);
  }
  with_parameter_type<T>(p.weight_dtype, [&](auto tag) {
    using W = typename decltype(tag)::type;
    if (p.weight != nullptr) {
      load_elements(static_cast<const W*>(p.weight) + column, weight);
#pragma unroll
      for (int i = 0; i < N; ++i) weight[i] += static_cast<C>(p.weight_offset);
    }
    if (p.bias != nullptr) load_elements(static_cast<const W*>(p.bias) + column, bias);
  });
}

/// Merges the moments {center, square, rest} of the parts of a row that the lanes of a warp have,
/// with their numbers of elements. The first part of lane 0 has elements; a missing part is zeros.
template <class C, int kParts>
__device__ __forceinline__ void merge_moments(const C (&counts)[kParts],
                                              const C (&parts)[kParts][3], C count,
                                              C (&merged)[3]) {
  const C from = __shfl_sync(~0u, parts[0][0], 0);
  C shift = 0;
#pragma unroll
  for (int k = 0; k < kParts; ++k) shift += counts[k] * (parts[k][0] - from) + parts[k][2];
  merged[0] = from + reduce_warp(shift) / count;
  C sums[2] = {};
#pragma unroll
  for (int k = 0; k < kParts; ++k) {
    const C distance = parts[k][0] - merged[0];
    sums[0] += parts[k][1] + distance * (counts[k] * distance + C(2) * parts[k][2]);
    sums[1] += parts[k][2] + counts[k] * distance;
  }
  reduce_warp(sums, Sum{});
  merged[1] = sums[0];
  merged[2] = sums[1];
}

}  // namespace
}  // namespace torchkiln::cuda
