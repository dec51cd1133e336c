#include "torchkiln/kernels/bias_act.h"

#include "detail/reduce/columns.cuh"
#include "torchkiln/device/alignment.cuh"
#include "torchkiln/device/elementwise.cuh"

namespace torchkiln::cuda {

using namespace device;
using namespace reduce;
namespace {

/// The sign bits from output `at` on, at most up to the end of its byte.
__device__ __forceinline__ uint32_t load_signs(const uint8_t* signs, int64_t at) {
  return signs[at / 8] >> (at % 8);
}

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

/// Blocks per SM and rows in flight per thread. A derivative computed from x has more arithmetic,
/// which needs more threads; that leaves fewer registers per thread. Measured on compute capability
/// 9.0.
struct Tuning {
  int blocks;
  int rows;
};
constexpr Tuning tuning(bool from_input, size_t element, int lanes) {
  if (lanes == 1) return {2, 8};
  if (!from_input || element == 8) return {2, 4};
  return element == 2 ? Tuning{3, 2} : Tuning{3, 3};
}

/// The derivative of an activation that is known at compile time.
template <class Act, class Math>
struct FixedDerivative {
  static constexpr bool kFromInput = Act::kSaved == Saved::input || Act::kSaved == Saved::output;

  __device__ __forceinline__ static constexpr Saved kept() {
    return Act::kSaved == Saved::output ? Saved::input : Act::kSaved;
  }

  template <class C>
  __device__ __forceinline__ C operator()(C grad, C argument) const {
    if constexpr (kept() == Saved::input) {
      return gradient_from_input<Act, Math>(grad, argument);
    } else {
      return Act::template gradient<Math>(grad, argument);
    }
  }
};

/// The derivative of an activation that is selected at run time.
template <class Math>
struct SelectedDerivative {
  static constexpr bool kFromInput = true;

  Activation activation;
  Saved kept_tensor;

  __device__ __forceinline__ Saved kept() const { return kept_tensor; }

  template <class C>
  __device__ __forceinline__ C operator()(C grad, C argument) const {
    C result{};
    with_activation(
        activation,
        [&](auto tag) {
          result = FixedDerivative<typename decltype(tag)::type, Math>{}(grad, argument);
        },
        Activations{});
    return result;
  }
};

/// Column body: one pass over grad and the saved tensor writes grad_x and sums the bias gradient.
template <class Gradient, class T, int Lanes>
struct GradientBody {
  using C = Compute<T>;
  static constexpr int kLanes = Lanes;
  static constexpr Tuning kTuning = tuning(Gradient::kFromInput, sizeof(T), Lanes);
  static constexpr int kRowsInFlight = kTuning.rows;

  struct Item {
    Vec<T, Lanes> grad;
    Vec<T, Lanes> saved;
    uint32_t signs;
  };

  BiasActBackward problem;
  Gradient gradient;
  C scale;
  C bias[Lanes];  // of the thread's columns; zeros if there is no bias

  __device__ __forceinline__ void begin(int64_t column, bool, C (&)[Lanes]) {
    if (gradient.kept() == Saved::input && problem.bias != nullptr) {
#pragma unroll
      for (int i = 0; i < Lanes; ++i) {
        const int64_t at = (column + i) * problem.bias_stride;
        bias[i] = problem.bias_dtype == Dtype::float32
                      ? static_cast<C>(static_cast<const float*>(problem.bias)[at])
                      : convert<C>(static_cast<const T*>(problem.bias)[at]);
      }
    }
  }

  __device__ __forceinline__ Item load(int64_t row, int64_t column) const {
    const BiasActBackward& p = problem;
    Item item;
    item.grad = load_vector<Lanes>(static_cast<const T*>(p.grad) + row * p.grad_row_stride +
                                   column * p.grad_column_stride);
    if (gradient.kept() == Saved::sign) {
      item.signs = load_signs(static_cast<const uint8_t*>(p.saved), row * p.columns + column);
    } else if (gradient.kept() == Saved::input) {
      item.saved = load_vector<Lanes>(static_cast<const T*>(p.saved) + row * p.saved_row_stride +
                                      column * p.saved_column_stride);
    }
    return item;
  }

  __device__ __forceinline__ void consume(const Item& item, int64_t row, int64_t column,
                                          C (&sum)[Lanes]) const {
    C scaled[Lanes];
#pragma unroll
    for (int i = 0; i < Lanes; ++i) {
      C argument{};
      if (gradient.kept() == Saved::sign) {
        argument = (item.signs >> i) & 1u ? C(1) : C(0);
      } else if (gradient.kept() == Saved::input) {
        argument = convert<C>(item.saved.lane[i]) * scale + bias[i];
      }
      const C grad_z = gradient(convert<C>(item.grad.lane[i]), argument);
      sum[i] += grad_z;
      scaled[i] = grad_z * scale;
    }
    if (problem.grad_x != nullptr)
      store(static_cast<T*>(problem.grad_x) + row * problem.columns + column, scaled);
  }
};

/// Whether rows of grad, of the saved tensor and of grad_x consist of whole 16-byte vectors.
bool uses_vectors(const BiasActBackward& p) {
  const int lanes = vector_lanes(p.dtype);
  return rows_in_vectors(p.grad_x, lanes, {p.columns}) && p.grad_column_stride == 1 &&
         rows_in_vectors(p.grad, lanes, {p.grad_row_stride}) &&
         (kept_by_bias_act(p.activation) != Saved::input ||
          (p.saved_column_stride == 1 && rows_in_vectors(p.saved, lanes, {p.saved_row_stride})));
}

template <class T, int Lanes, class Gradient>
Status launch_gradients(const BiasActBackward& p, const Gradient& gradient, Allocate allocate,
                        CUstream_st* stream) {
  using Body = GradientBody<Gradient, T, Lanes>;
  constexpr int kBlocks = Body::kTuning.blocks;
  const Body body{p, gradient, static_cast<Compute<T>>(p.scale), {}};
  const columns::Plan plan = columns::make_plan(p.rows, p.columns, Lanes, kBlocks);
  return columns::launch<kBlocks>(body, plan, allocate, p.grad_bias, p.bias_dtype, stream);
}

/// grad_x without a bias gradient is elementwise.
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

Status bias_act_backward(const BiasActBackward& p, Allocate allocate, CUstream_st* stream) {
  if (p.columns == 0) return {};
  return dispatch_floating(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using Math = MathFor<T>;
    if (p.grad_bias == nullptr) return grad_x_only<T>(p, stream);
    const SelectedDerivative<Math> chosen{p.activation, kept_by_bias_act(p.activation)};
    if (!uses_vectors(p)) return launch_gradients<T, 1>(p, chosen, allocate, stream);
    constexpr int kLanes = kVectorLanes<T>;
    // float64 has one kernel for all activations, because its code is long.
    if constexpr (sizeof(T) == 8) {
      return launch_gradients<T, kLanes>(p, chosen, allocate, stream);
    } else {
      Status status{"unknown activation"};
      with_activation(
          p.activation,
          [&](auto act) {
            const FixedDerivative<typename decltype(act)::type, Math> gradient;
            status = launch_gradients<T, kLanes>(p, gradient, allocate, stream);
          },
          Activations{});
      return status;
    }
  });
}

}  // namespace torchkiln::cuda
