#pragma once

// Gradients of weight and bias, and the coefficients of grad_x, from the sums of a channel.

#include "detail/reduce/common.cuh"
#include "torchkiln/kernels/batch_norm.h"

namespace torchkiln::cuda {
namespace {

/// Writes the gradients and coefficients of a channel. `sums`: the sums of g and of g * (x - mean),
/// with the mean rounded to C.
template <class C>
__device__ __forceinline__ void finish_sums(const BatchNormBackward& p, int64_t channel,
                                            const double (&sums)[2]) {
  const int64_t channels = p.layout.channels;
  const C* const statistics = static_cast<const C*>(p.statistics) + channel;
  const auto low = static_cast<double>(statistics[channels]);
  const auto rstd = static_cast<double>(statistics[2 * channels]);
  const double sum = sums[0];
  const double product = (sums[1] - low * sum) * rstd;
  if (p.grad_weight != nullptr)
    reduce::Result{p.grad_weight, p.parameter_dtype, 1}.store(channel, product);
  if (p.grad_bias != nullptr) reduce::Result{p.grad_bias, p.parameter_dtype, 1}.store(channel, sum);
  if (p.coefficients == nullptr) return;
  C* const coefficients = static_cast<C*>(p.coefficients);
  const double count =
      p.count == nullptr ? static_cast<double>(p.layout.outer) * static_cast<double>(p.layout.inner)
                         : *p.count;
  const double slope = product * rstd / count;
  coefficients[channel] = static_cast<C>(slope);
  coefficients[channels + channel] = static_cast<C>(sum / count - slope * low);
}

}  // namespace
}  // namespace torchkiln::cuda
