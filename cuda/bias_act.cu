#include "torchkiln/kernels/bias_act.h"

#include "torchkiln/columns.cuh"
#include "torchkiln/elementwise.cuh"
#include "torchkiln/functors.h"

namespace torchkiln::cuda {
namespace {

template <class T, int Lanes>
struct GradientBody {
  using C = Compute<T>;
  static constexpr int kLanes = Lanes;
  static constexpr int kRowsInFlight = Lanes > 1 ? 4 : 8;

  struct Item {
    Vec<T, Lanes> grad;
    Vec<T, Lanes> output;
  };

  const T* grad;
  const T* output;
  T* grad_x;
  int64_t columns;
  int64_t grad_row_stride;
  int64_t grad_column_stride;
  C scale;

  __device__ __forceinline__ Item load(int64_t row, int64_t column) const {
    return {load_vector<Lanes>(grad + row * grad_row_stride + column * grad_column_stride),
            load_vector<Lanes>(output + row * columns + column)};
  }

  __device__ __forceinline__ void consume(const Item& item, int64_t row, int64_t column,
                                          C (&sum)[Lanes]) const {
    C scaled[Lanes];
#pragma unroll
    for (int i = 0; i < Lanes; ++i) {
      const C passed =
          Relu::gradient(convert<C>(item.grad.lane[i]), convert<C>(item.output.lane[i]));
      sum[i] += passed;
      scaled[i] = passed * scale;
    }
    if (grad_x != nullptr) store(grad_x + row * columns + column, scaled);
  }
};

/// Whether rows of grad, output and grad_x can be read and written by whole vectors.
bool by_vectors(const ScaleBiasReluBackward& p) {
  const int64_t size = static_cast<int64_t>(size_of(p.dtype));
  return p.columns * size % kVectorBytes == 0 && p.grad_column_stride == 1 &&
         p.grad_row_stride * size % kVectorBytes == 0 && aligned(p.grad, kVectorBytes) &&
         aligned(p.output, kVectorBytes) && aligned(p.grad_x, kVectorBytes);
}

columns::Plan plan_of(const ScaleBiasReluBackward& p) {
  const int lanes = by_vectors(p) ? kVectorBytes / static_cast<int>(size_of(p.dtype)) : 1;
  return columns::make_plan(p.rows, p.columns, lanes);
}

template <class T, int Lanes>
Status both_gradients(const ScaleBiasReluBackward& p, CUstream_st* stream) {
  GradientBody<T, Lanes> body;
  body.grad = static_cast<const T*>(p.grad);
  body.output = static_cast<const T*>(p.output);
  body.grad_x = static_cast<T*>(p.grad_x);
  body.columns = p.columns;
  body.grad_row_stride = p.grad_row_stride;
  body.grad_column_stride = p.grad_column_stride;
  body.scale = static_cast<Compute<T>>(p.scale);
  return columns::launch(body, plan_of(p), p.workspace, p.grad_bias, p.bias_dtype, stream);
}

/// Without a bias gradient there is nothing to sum: the elementwise skeleton does it.
template <class T>
Status grad_x_alone(const ScaleBiasReluBackward& p, CUstream_st* stream) {
  Elementwise<2> arguments{p.grad_x, p.dtype, {p.grad, p.output}, {p.dtype, p.dtype}, {}};
  Dimension<2> dims[] = {{p.columns, 1, {p.grad_column_stride, 1}},
                         {p.rows, p.columns, {p.grad_row_stride, p.columns}}};
  if (!make_layout(dims, 2, arguments.layout)) return {"unreachable: two dimensions always fit"};
  return elementwise::launch<T, T, T>(
      ScaledGradient<Relu, Compute<T>>{static_cast<Compute<T>>(p.scale)}, arguments, stream);
}

}  // namespace

Status scale_bias_relu(const Elementwise<2>& arguments, double scale, CUstream_st* stream) {
  return dispatch<float, double, __half, __nv_bfloat16>(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const ScaleBias<Relu, Compute<T>> functor{static_cast<Compute<T>>(scale)};
    if (arguments.in_dtype[1] == DtypeOf<T>::value)
      return elementwise::launch<T, T, T>(functor, arguments, stream);
    return elementwise::launch<T, T, float>(functor, arguments, stream);
  });
}

size_t workspace_bytes(const ScaleBiasReluBackward& p) {
  if (p.grad_bias == nullptr || p.rows * p.columns == 0) return 0;
  return columns::partial_bytes(plan_of(p),
                                p.dtype == Dtype::float64 ? sizeof(double) : sizeof(float));
}

Status scale_bias_relu_backward(const ScaleBiasReluBackward& p, CUstream_st* stream) {
  if (p.columns == 0) return {};
  return dispatch<float, double, __half, __nv_bfloat16>(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (p.grad_bias == nullptr) return grad_x_alone<T>(p, stream);
    return by_vectors(p) ? both_gradients<T, kVectorLanes<T>>(p, stream)
                         : both_gradients<T, 1>(p, stream);
  });
}

}  // namespace torchkiln::cuda
