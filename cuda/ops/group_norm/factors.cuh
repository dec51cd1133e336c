#pragma once

// The factors of the channels of a sample, and the activation, for the kernels of group norm.

#include "choose.h"
#include "ops/batch_norm/factors.cuh"

namespace torchkiln::cuda {
namespace {

/// The group of the calling thread, in kernels with one group per thread.
__device__ __forceinline__ int64_t group_of_thread() {
  return int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
}

/// For each channel of a sample, the index of its group among the groups of all samples.
template <int N>
__device__ __forceinline__ void groups_of(const GroupLayout& layout, int64_t sample,
                                          const int64_t (&channels)[N], int64_t (&to)[N]) {
  const auto width = static_cast<uint32_t>(layout.channels_per_group());
#pragma unroll
  for (int i = 0; i < N; ++i)
    to[i] = sample * layout.groups + static_cast<uint32_t>(channels[i]) / width;
}

template <class Access, class Problem, int N>
__device__ __forceinline__ void load_factors(const Problem& p, int64_t sample,
                                             const int64_t (&channels)[N],
                                             ChannelFactors<Access>& factors) {
  using C = typename Access::C;
  const C* const statistics = static_cast<const C*>(p.statistics);
  const int64_t all = p.layout.all_groups();
  int64_t groups[N];
  groups_of(p.layout, sample, channels, groups);
  C low[N], rstd[N];
  read_each<C>(statistics, groups, factors.mean);
  read_each<C>(statistics + all, groups, low);
  read_each<C>(statistics + 2 * all, groups, rstd);
  factors.set(p, channels, low, rstd);
}

/// Loads the factors for the channels of a thread. The channel numbers are computed again for each
/// sample, because otherwise they would occupy registers that vectors in flight need.
template <class Access, class Problem>
__device__ __forceinline__ void load_factors(const Problem& p, int64_t sample,
                                             const ChannelCursor<Access>& cursor,
                                             ChannelFactors<Access>& factors) {
  int64_t channels[ChannelFactors<Access>::kChannels];
  cursor.channels(channels);
  load_factors(p, sample, channels, factors);
}

/// The factors and the coefficients of the gradient of x:
///   grad_x = g * scale - slope * (x - mean) - level.
template <class Access>
struct InputGradient {
  using C = typename Access::C;
  static constexpr int kChannels = ChannelFactors<Access>::kChannels;
  ChannelFactors<Access> factors;
  C slope[kChannels];
  C level[kChannels];

  __device__ __forceinline__ void load(const GroupNormBackward& p, const C* coefficients,
                                       int64_t sample, const int64_t (&channels)[kChannels]) {
    load_factors(p, sample, channels, factors);
    int64_t groups[kChannels];
    groups_of(p.layout, sample, channels, groups);
    read_each<C>(coefficients, groups, slope);
    read_each<C>(coefficients + p.layout.all_groups(), groups, level);
  }

  __device__ __forceinline__ void load(const GroupNormBackward& p, const C* coefficients,
                                       int64_t sample, const ChannelCursor<Access>& cursor) {
    int64_t channels[kChannels];
    cursor.channels(channels);
    load(p, coefficients, sample, channels);
  }

  template <class Item, class Act>
  __device__ __forceinline__ void write(const Item& item, const Act& act,
                                        typename Access::T* to) const;
};

template <class T, class C, int N>
__device__ __forceinline__ void write_elements(T* to, const C (&values)[N]) {
  if constexpr (N > 1) {
    store_vectors(to, values);
  } else {
    store(to, values);
  }
}

/// Computes g, the gradient of the argument of the activation, and x - mean of an item: vectors of
/// the incoming gradient and of x.
template <class Access, class Act, class Item>
__device__ __forceinline__ void argument_gradient(const ChannelFactors<Access>& factors,
                                                  const Act& act, const Item& item,
                                                  typename Access::C (&g)[Access::kLanes],
                                                  typename Access::C (&from_mean)[Access::kLanes]) {
  typename Access::C z[Access::kLanes];
  factors.normalize(item.of[1], z);
  widen(item.of[0], g);
  act.differentiate(g, z);
  widen(item.of[1], from_mean);
#pragma unroll
  for (int i = 0; i < Access::kLanes; ++i) from_mean[i] -= factors.mean[factors.of(i)];
}

template <class Access>
template <class Item, class Act>
__device__ __forceinline__ void InputGradient<Access>::write(const Item& item, const Act& act,
                                                             typename Access::T* to) const {
  C g[Access::kLanes], from_mean[Access::kLanes];
  argument_gradient(factors, act, item, g, from_mean);
#pragma unroll
  for (int i = 0; i < Access::kLanes; ++i) {
    const int c = factors.of(i);
    g[i] = fma(-slope[c], from_mean[i], g[i] * factors.scale[c]) - level[c];
  }
  write_elements(to, g);
}

/// Writes y for a vector of x.
template <class Access, class Act, class Vector>
__device__ __forceinline__ void write_output(const ChannelFactors<Access>& factors, const Act& act,
                                             const Vector& x, typename Access::T* to) {
  typename Access::C z[Access::kLanes];
  factors.normalize(x, z);
  act.apply(z);
  write_elements(to, z);
}

/// Calls body(activation). Kernels that read vectors have silu compiled in; all other activations
/// are selected at run time.
template <class Access, class Body>
Status with_group_activation(Activation activation, const Body& body) {
  using Math = MathFor<typename Access::T>;
  if constexpr (Access::kLanes > 1) {
    if (activation == kActivation<Silu>) return body(FixedActivation<Silu, Math>{});
  }
  return body(SelectedActivation<Math>{activation});
}

}  // namespace
}  // namespace torchkiln::cuda
