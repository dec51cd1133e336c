#pragma once

// The target of a row of logits, as the kernels read it.

#include <cstdio>

#include "choose.h"
#include "detail/rowwise/vectors.cuh"

namespace torchkiln::cuda {
namespace {

/// Exponents z below this bound are raised to it in products z * exp(z): these products are then 0,
/// also for -infinity, whose product would be NaN.
template <class C>
inline constexpr C kLeastExponent = C(-1e4);

/// The product, rounded before a subtraction. A fused multiply-subtract would return the rounding
/// error of the product for equal logits: 1e31 for logits of 1e38.
__device__ __forceinline__ float rounded_product(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double rounded_product(double a, double b) { return __dmul_rn(a, b); }

/// Class and weight of a row's target.
template <class C>
struct RowTarget {
  int64_t index = -1;  // counted from the row's first class; negative if that is in another shard,
                       // or if probabilities are given
  C weight = 1;        // weight of the row; 0 if it is ignored or its class is in another shard
  bool ignored = false;
};

__device__ __noinline__ void trap_on_target(long long target, long long classes, long long row) {
  printf(
      "torchkiln.cross_entropy: target: got %lld in row %lld, expected 0 to %lld or ignore_index\n",
      target, row, classes - 1);
  __trap();
}

template <class C>
__device__ __forceinline__ RowTarget<C> target_of(const ClassTarget& target, int64_t row,
                                                  int64_t classes) {
  RowTarget<C> found;
  if (target.index == nullptr) return found;
  const int64_t index = target.index[row];
  if (index == target.ignore_index) {
    found.weight = 0;
    found.ignored = true;
    return found;
  }
  if (static_cast<uint64_t>(index) >= static_cast<uint64_t>(target.all_classes))
    trap_on_target(index, target.all_classes, row);
  const int64_t own = index - target.first_class;
  if (static_cast<uint64_t>(own) >= static_cast<uint64_t>(classes)) {
    found.weight = 0;
    return found;
  }
  found.index = own;
  if (target.weight != nullptr) found.weight = static_cast<const C*>(target.weight)[found.index];
  return found;
}

/// The distribution q of a row, a vector of classes at a time, if q is spread over several classes.
template <class Access, class C>
struct Distribution {
  using T = typename Access::T;
  static constexpr int kLanes = Access::kLanes;

  const void* probabilities;  // null if a class is given
  Dtype dtype;                // dtype of the probabilities
  int64_t row_begin;          // begin of the row in `probabilities`, in elements
  const C* weight;
  int index;
  C confidence;  // 1 - label_smoothing
  C uniform;     // label_smoothing / classes

  __device__ __forceinline__ Distribution(const ClassTarget& target, int64_t row, int64_t index_)
      : probabilities(target.probabilities),
        dtype(target.probabilities_dtype),
        row_begin(row * target.probabilities_row_stride),
        weight(static_cast<const C*>(target.weight)),
        index(static_cast<int>(index_)),
        confidence(static_cast<C>(1 - target.label_smoothing)),
        uniform(static_cast<C>(target.label_smoothing / static_cast<double>(target.all_classes))) {}

  template <class P>
  __device__ __forceinline__ const P* row() const {
    return static_cast<const P*>(probabilities) + row_begin;
  }

  /// Loads probabilities. They have the dtype of the logits, or one of the two is float32 and the
  /// other has half precision.
  __device__ __forceinline__ void load_row(const Access& access, int column, C (&q)[kLanes]) const {
    if (dtype == DtypeOf<T>::value) {
      widen(access.load(row<T>(), column), q);
    } else if constexpr (sizeof(T) == 2) {
      access.load_parameters(column, row<float>(), q);
    } else if constexpr (sizeof(T) == 4) {
      if (dtype == Dtype::float16) {
        access.load_parameters(column, row<__half>(), q);
      } else {
        access.load_parameters(column, row<__nv_bfloat16>(), q);
      }
    }
  }

  __device__ __forceinline__ void load(const Access& access, int column, C (&q)[kLanes]) const {
    if (probabilities != nullptr) {
      load_row(access, column, q);
    } else {
#pragma unroll
      for (int i = 0; i < kLanes; ++i) q[i] = column + i == index ? C(1) : C(0);
    }
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      if (!access.has(column, i)) continue;
      q[i] = confidence * q[i] + uniform;
      if (weight != nullptr) q[i] *= weight[column + i];
    }
  }
};

}  // namespace
}  // namespace torchkiln::cuda
