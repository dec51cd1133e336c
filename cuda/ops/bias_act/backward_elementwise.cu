// The gradient of x, if no gradient of the bias is wanted: an elementwise kernel. It reads the
// incoming gradient and, if the derivative needs them, the sign bits or x.

#include "backward.cuh"
#include "torchkiln/device/elementwise.cuh"

namespace torchkiln::cuda {

using namespace device;
namespace {

/// grad_x from the sign bits, if no bias gradient is wanted.
template <class Act, class Math, class C>
struct FromSigns {
  C scale;
  const uint8_t* signs;

  template <bool Full, class Packet, int N, size_t... K>
  __device__ __forceinline__ void run(const Packet& packet, int64_t at, int64_t numel,
                                      C (&results)[1][N], std::index_sequence<K...>) const {
    const uint32_t bits = Full || at < numel ? load_signs(signs, at) : 0;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const C output = (bits >> i) & 1u ? C(1) : C(0);
      results[0][i] = Act::template gradient<Math>(packet.template get<0>(i), output) * scale;
    }
  }
};

template <class T>
Status grad_x_only(const BiasActBackward& p, CUstream_st* stream) {
  using C = Compute<T>;
  using Math = MathFor<T>;
  const C scale = static_cast<C>(p.scale);
  const Saved kept = kept_by_bias_act(p.activation);
  const int64_t row_strides[] = {p.grad_row_stride, p.saved_row_stride, 0};
  const int64_t column_strides[] = {p.grad_column_stride, p.saved_column_stride, p.bias_stride};
  const auto describe = [&](auto& arguments) {
    constexpr int kInputs = std::extent_v<decltype(arguments.in)>;
    const void* inputs[] = {p.grad, p.saved, p.bias};
    const Dtype dtypes[] = {p.dtype, p.dtype, p.bias_dtype};
    Dimension<kInputs> dims[2] = {{p.columns, {1}, {}}, {p.rows, {p.columns}, {}}};
    arguments.out[0] = p.grad_x;
    arguments.dtype = p.dtype;
    for (int k = 0; k < kInputs; ++k) {
      arguments.in[k] = inputs[k];
      arguments.in_dtype[k] = dtypes[k];
      dims[0].stride[k] = column_strides[k];
      dims[1].stride[k] = row_strides[k];
    }
    (void)make_layout(dims, 2, arguments.layout);  // two dimensions always fit
  };

  if (kept == Saved::nothing) {
    Elementwise<1> arguments{};
    describe(arguments);
    return elementwise::launch<T, T>(ScaleShift<C>{scale, C(0)}, arguments, stream);
  }
  if (kept == Saved::sign) {
    Elementwise<1> arguments{};
    describe(arguments);
    const FromSigns<Relu, Math, C> body{scale, static_cast<const uint8_t*>(p.saved)};
    return elementwise::launch_bodies<T, T>(body, body, arguments, stream);
  }
  using Make = elementwise::MakeScaled<BiasActivatedGradient, Math, C>;
  const elementwise::Switched<Make, Activations> body{p.activation, Make{scale}};
  Elementwise<3> arguments{};
  describe(arguments);
  return with_parameter_type<T>(p.bias_dtype, [&](auto bias) {
    using Bias = typename decltype(bias)::type;
    return elementwise::launch_bodies<T, T, T, Bias>(body, body, arguments, stream);
  });
}

}  // namespace

Status bias_act_grad_x(const BiasActBackward& p, CUstream_st* stream) {
  return dispatch_floating(
      p.dtype, [&](auto tag) { return grad_x_only<typename decltype(tag)::type>(p, stream); });
}

}  // namespace torchkiln::cuda
