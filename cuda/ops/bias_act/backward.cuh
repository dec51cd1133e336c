#pragma once

// Shared by backward.cu, which computes the gradients of x and bias, and backward_elementwise.cu,
// which computes that of x alone.

#include "torchkiln/device/vec.cuh"
#include "torchkiln/kernels/bias_act.h"

namespace torchkiln::cuda {

/// Computes the gradient of x without that of the bias, element by element.
Status bias_act_grad_x(const BiasActBackward& p, CUstream_st* stream);

namespace {

/// The sign bits from output `at` on, at most up to the end of its byte.
__device__ __forceinline__ uint32_t load_signs(const uint8_t* signs, int64_t at) {
  return signs[at / 8] >> (at % 8);
}

}  // namespace
}  // namespace torchkiln::cuda
