#pragma once

// The gradients of a row of logits, from the state that forward saved.

#include "target.cuh"
#include "torchkiln/core/scalar_math.h"

namespace torchkiln::cuda {
namespace {

__device__ __forceinline__ double load_number(const void* from, Dtype dtype, int64_t at) {
  switch (dtype) {
    case Dtype::float32:
      return static_cast<const float*>(from)[at];
    case Dtype::float64:
      return static_cast<const double*>(from)[at];
    case Dtype::float16:
      return __half2float(static_cast<const __half*>(from)[at]);
    default:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(from)[at]);
  }
}

template <class C>
struct RowGradient {
  RowTarget<C> target;
  C scale;
  C log_sum_exp;
  C slope;
  C tilt = 0;  // for the entropy: the gradient is (slope + tilt * exponent) * exp(exponent)

  __device__ __forceinline__ RowGradient(const CrossEntropyBackward& p, int64_t row)
      : target(target_of<C>(p.target, row, p.classes)),
        scale(static_cast<C>(load_number(p.grad, p.grad_dtype, row * p.grad_stride))),
        log_sum_exp(static_cast<const C*>(p.log_sum_exp)[row]) {
    if (p.divisor != nullptr) scale /= *static_cast<const C*>(p.divisor);
    slope = scale * static_cast<const C*>(p.mass)[row];
  }

  /// Changes the factors to those for the gradients of a log-probability and an entropy.
  __device__ __forceinline__ void use_logprob(const CrossEntropyBackward& p, int64_t row) {
    const C factor = static_cast<C>(p.factor);
    scale *= -factor;
    slope *= -factor;
    if (p.grad_entropy == nullptr) return;
    const C mass = static_cast<const C*>(p.mass)[row];
    tilt = -static_cast<const C*>(p.grad_entropy)[row] * factor * mass;
    slope += tilt * static_cast<const C*>(p.entropy)[row];
  }
};

}  // namespace
}  // namespace torchkiln::cuda
