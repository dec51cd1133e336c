// out = (kept ? x * scale : 0) + residual, with (x + bias) in place of x if there is a bias, and
// the gradient of x: elementwise kernels whose body draws the mask from the seed (mask.cuh), in
// both directions. bias_backward.cu also sums the gradient of the bias.

#include "mask.cuh"
#include "torchkiln/device/elementwise.cuh"

namespace torchkiln::cuda {
namespace {

/// The body of (kept ? x * scale : 0) + residual, with (x + bias) instead of x if there are three
/// inputs.
template <class C>
struct DropoutAdd {
  Dropout dropout;
  C scale;

  template <bool Full, class Packet, int N, size_t... K>
  __device__ __forceinline__ void run(const Packet& packet, int64_t at, int64_t, C (&results)[1][N],
                                      std::index_sequence<K...>) const {
    constexpr int kInputs = sizeof...(K);
    const RandomState random = dropout.random.resolved();
    if (at == 0 && random.record != nullptr) random.write_record();
    const Mask<N> mask(dropout, random, at);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      C x = packet.template get<0>(i);
      if constexpr (kInputs == 3) x += packet.template get<1>(i);
      x = mask.kept(i) ? x * scale : C(0);
      if constexpr (kInputs > 1) x += packet.template get<kInputs - 1>(i);
      results[0][i] = x;
    }
  }
};

__global__ void record_state(const RandomState random) {
  wait_for_previous_kernel();
  random.resolved().write_record();
}

template <class T, class... In, class Arguments>
Status run(const Arguments& arguments, const Dropout& dropout, CUstream_st* stream) {
  const DropoutAdd<Compute<T>> body{dropout, static_cast<Compute<T>>(dropout.scale)};
  return elementwise::launch_bodies<T, In...>(body, body, arguments, stream);
}

}  // namespace

Status record_random(const RandomState& random, CUstream_st* stream) {
  return launch_overlapped(record_state, Grid{dim3(1), dim3(1)}, stream, random);
}

Status dropout_add(const Elementwise<2>& arguments, const Dropout& dropout, CUstream_st* stream) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return run<T, T, T>(arguments, dropout, stream);
  });
}

Status bias_dropout_add(const Elementwise<3>& arguments, const Dropout& dropout,
                        CUstream_st* stream) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return with_parameter_type<T>(arguments.in_dtype[1], [&](auto bias) {
      return run<T, T, typename decltype(bias)::type, T>(arguments, dropout, stream);
    });
  });
}

Status dropout_backward(const Elementwise<1>& arguments, const Dropout& dropout,
                        CUstream_st* stream) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return run<T, T>(arguments, dropout, stream);
  });
}

}  // namespace torchkiln::cuda
