#pragma once

// Forward of bias_act() as templates of the element type. Two source files compile them: one for
// half precision, one for the other dtypes.

#include "torchkiln/device/elementwise.cuh"
#include "torchkiln/kernels/bias_act.h"

namespace torchkiln::cuda {

using namespace device;

/// bias_act() in float16 and bfloat16.
Status bias_act_in_half_precision(const BiasAct& p, CUstream_st* stream);

namespace {

/// Runs the functor and stores one bit per result: whether the rounded result is not <= 0.
template <class Functor, class Out>
struct WithSigns {
  static constexpr bool kSharesBytes = true;

  Functor functor;
  uint8_t* signs;

  template <bool Full, class Packet, class C, int N, size_t... K>
  __device__ __forceinline__ void run(const Packet& packet, int64_t at, int64_t numel,
                                      C (&results)[1][N], std::index_sequence<K...> each) const {
    elementwise::Each<Functor>{functor}.template run<Full>(packet, at, numel, results, each);
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const bool positive = !(convert<C>(convert<Out>(results[0][i])) <= C(0));
      if (positive && (Full || at + i < numel)) bits |= 1u << i;
    }
    // kGroup adjacent threads share a byte; a block begins at a whole byte.
    constexpr int kGroup = 8 / N;
    const int index_in_byte = threadIdx.x % kGroup;
    bits <<= index_in_byte * N;
#pragma unroll
    for (int step = 1; step < kGroup; step *= 2) bits |= __shfl_xor_sync(~0u, bits, step);
    if (index_in_byte == 0 && (Full || at < numel)) signs[at / 8] = static_cast<uint8_t>(bits);
  }
};

template <class T, class Bias>
Status forward(const BiasAct& p, CUstream_st* stream) {
  using C = Compute<T>;
  using Math = MathFor<T>;
  const C scale = static_cast<C>(p.scale);
  if (p.signs != nullptr) {
    // Only relu saves signs.
    const BiasActivated<Relu, Math, C> functor{scale};
    const WithSigns<BiasActivated<Relu, Math, C>, T> body{functor, p.signs};
    return elementwise::launch_bodies<T, T, Bias>(body, body, p.elements, stream);
  }
  return elementwise::launch_activated<T, T, Bias>(
      p.activation, elementwise::MakeScaled<BiasActivated, Math, C>{scale}, p.elements, stream);
}

/// bias_act() for elements of type T, with a bias of that type or of float32.
template <class T>
Status forward_of(const BiasAct& p, CUstream_st* stream) {
  return with_parameter_type<T>(p.elements.in_dtype[1], [&](auto bias) {
    return forward<T, typename decltype(bias)::type>(p, stream);
  });
}

}  // namespace
}  // namespace torchkiln::cuda
