#pragma once

// The factors of each channel and the activation, for the kernels that compute outputs and
// gradients.

#include "reader.cuh"
#include "torchkiln/core/activations.h"

namespace torchkiln::cuda {
namespace {

template <class P, class C, int N>
__device__ __forceinline__ void read_each(const void* from, const int64_t (&at)[N], C (&to)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i)
    to[i] = convert<C>(convert<Compute<P>>(static_cast<const P*>(from)[at[i]]));
}

/// Reads N numbers of a parameter of either dtype. The dtype is tested once, not per load, so that
/// all loads are in flight together.
template <class C, int N>
__device__ __forceinline__ void read_parameters(const void* from, const int64_t (&at)[N],
                                                Dtype dtype, C (&to)[N]) {
  switch (dtype) {
    case Dtype::float32:
      return read_each<float>(from, at, to);
    case Dtype::float64:
      return read_each<double>(from, at, to);
    case Dtype::float16:
      return read_each<__half>(from, at, to);
    default:
      return read_each<__nv_bfloat16>(from, at, to);
  }
}

template <class C>
__device__ __forceinline__ C read_parameter(const void* from, int64_t at, Dtype dtype) {
  C value[1];
  read_parameters(from, {at}, dtype, value);
  return value[0];
}

/// The factors of a thread's channels: the argument of the activation is
/// (x - mean) * scale + shift.
template <class Access>
struct ChannelFactors {
  using C = typename Access::C;
  static constexpr int kChannels = Access::kColumns ? Access::kLanes : 1;
  C mean[kChannels];
  C scale[kChannels];
  C shift[kChannels];

  /// The channel of a lane.
  static constexpr __device__ int of(int lane) { return Access::kColumns ? lane : 0; }

  /// Sets scale and shift. `low`: the part of each mean that rounding to C cut off.
  template <class Problem>
  __device__ __forceinline__ void set(const Problem& p, const int64_t (&channels)[kChannels],
                                      const C (&low)[kChannels], const C (&rstd)[kChannels]) {
    C weight[kChannels], bias[kChannels];
    if (p.weight != nullptr) read_parameters(p.weight, channels, p.parameter_dtype, weight);
    if (p.bias != nullptr) read_parameters(p.bias, channels, p.parameter_dtype, bias);
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      scale[i] = p.weight == nullptr ? rstd[i] : rstd[i] * weight[i];
      shift[i] = p.bias == nullptr ? C(0) : bias[i];
      // If the weight is infinite, its product with `low` (perhaps 0) must not make the result NaN.
      if (scale[i] - scale[i] == C(0)) shift[i] -= low[i] * scale[i];
    }
  }

  template <class Problem>
  __device__ __forceinline__ void load(const Problem& p, const int64_t (&channels)[kChannels]) {
    const C* const statistics = static_cast<const C*>(p.statistics);
    C low[kChannels], rstd[kChannels];
    read_each<C>(statistics, channels, mean);
    read_each<C>(statistics + p.layout.channels, channels, low);
    read_each<C>(statistics + 2 * p.layout.channels, channels, rstd);
    set(p, channels, low, rstd);
  }

  /// The argument of the activation without the residual. Forward and backward call this function,
  /// so their roundings are equal.
  template <class T, int N>
  __device__ __forceinline__ void normalize(const Vec<T, N>& x, C (&z)[N]) const {
    widen(x, z);
#pragma unroll
    for (int i = 0; i < N; ++i) z[i] = fma(z[i] - mean[of(i)], scale[of(i)], shift[of(i)]);
  }
};

template <class T, class C, int N>
__device__ __forceinline__ void add_vector(const Vec<T, N>& residual, C (&z)[N]) {
  C added[N];
  widen(residual, added);
#pragma unroll
  for (int i = 0; i < N; ++i) z[i] += added[i];
}

/// An activation that is a template parameter.
template <class Act, class Math>
struct FixedActivation {
  static constexpr bool kIsFixed = true;
  /// Whether the derivative needs the residual: see kept_by_batch_norm().
  static constexpr bool kReadsResidual =
      Act::kSaved == Saved::input || Act::kSaved == Saved::output;

  template <class C, int N>
  __device__ __forceinline__ void apply(C (&z)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) z[i] = Act::template value<Math>(z[i]);
  }
  template <class C, int N>
  __device__ __forceinline__ void differentiate(C (&grad)[N], const C (&z)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) grad[i] = gradient_from_input<Act, Math>(grad[i], z[i]);
  }
};

/// An activation that is selected at run time, once per vector.
template <class Math>
struct SelectedActivation {
  static constexpr bool kIsFixed = false;
  static constexpr bool kReadsResidual = true;

  Activation activation;

  template <class C, int N>
  __device__ __forceinline__ void apply(C (&z)[N]) const {
    with_activation(
        activation,
        [&](auto tag) { FixedActivation<typename decltype(tag)::type, Math>{}.apply(z); },
        Activations{});
  }
  template <class C, int N>
  __device__ __forceinline__ void differentiate(C (&grad)[N], const C (&z)[N]) const {
    with_activation(
        activation,
        [&](auto tag) {
          FixedActivation<typename decltype(tag)::type, Math>{}.differentiate(grad, z);
        },
        Activations{});
  }
};

/// Calls body(activation). Except for float64, kernels with relu are compiled; all other
/// activations are selected at run time.
template <class Access, class Body>
Status with_channel_activation(Activation activation, const Body& body) {
  using Math = MathFor<typename Access::T>;
  if constexpr (sizeof(typename Access::T) < 8) {
    if (activation == kActivation<Relu>) return body(FixedActivation<Relu, Math>{});
  }
  return body(SelectedActivation<Math>{activation});
}

}  // namespace
}  // namespace torchkiln::cuda
