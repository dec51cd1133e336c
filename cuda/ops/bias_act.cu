#include "torchkiln/kernels/bias_act.h"

#include "detail/reduce/columns.cuh"
#include "torchkiln/device/elementwise.cuh"

namespace torchkiln::cuda {

using namespace device;
using namespace reduce;
namespace {

/// Each<Functor>, and a bit for every result that is not <= 0 as it will be stored.
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
    // A byte belongs to as many neighbouring threads; a block begins with a whole one.
    constexpr int kGroup = 8 / N;
    const int place = threadIdx.x % kGroup;
    bits <<= place * N;
#pragma unroll
    for (int step = 1; step < kGroup; step *= 2) bits |= __shfl_xor_sync(~0u, bits, step);
    if (place == 0 && (Full || at < numel)) signs[at / 8] = static_cast<uint8_t>(bits);
  }
};

/// The signs of `lanes` adjacent outputs, the first of which lies `at` a multiple of lanes.
__device__ __forceinline__ uint32_t load_signs(const uint8_t* signs, int64_t at) {
  return signs[at / 8] >> (at % 8);
}

/// grad_x from signs, where no bias gradient is wanted.
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

/// How many blocks a multiprocessor holds, and how many rows a thread has in flight. Where the
/// derivative is computed from x, its arithmetic wants more threads, which leaves each of them
/// fewer registers: measured on compute capability 9.0.
struct Tuning {
  int blocks;
  int rows;
};
constexpr Tuning tuning(bool from_input, size_t element, int lanes) {
  if (lanes == 1) return {2, 8};
  if (!from_input || element == 8) return {2, 4};
  return element == 2 ? Tuning{3, 2} : Tuning{3, 3};
}

/// The derivative of one activation, from what is kept.
template <class Act, class Math>
struct Fixed {
  static constexpr bool kFromInput = Act::kSaved == Saved::input || Act::kSaved == Saved::output;

  __device__ __forceinline__ static constexpr Saved kept() {
    return Act::kSaved == Saved::output ? Saved::input : Act::kSaved;
  }

  template <class C>
  __device__ __forceinline__ C operator()(C grad, C from) const {
    if constexpr (kept() == Saved::input) {
      return gradient_from_input<Act, Math>(grad, from);
    } else {
      return Act::template gradient<Math>(grad, from);
    }
  }
};

/// The derivative of any activation.
template <class Math>
struct Chosen {
  static constexpr bool kFromInput = true;

  Activation activation;
  Saved keeps;

  __device__ __forceinline__ Saved kept() const { return keeps; }

  template <class C>
  __device__ __forceinline__ C operator()(C grad, C from) const {
    C result{};
    with_activation(
        activation,
        [&](auto tag) { result = Fixed<typename decltype(tag)::type, Math>{}(grad, from); },
        Activations{});
    return result;
  }
};

/// One pass over grad and what was saved: writes grad_x, sums the bias gradient.
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
  C bias[Lanes];  // of the thread's columns; zeros where there is none

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
      C from{};
      if (gradient.kept() == Saved::sign) {
        from = (item.signs >> i) & 1u ? C(1) : C(0);
      } else if (gradient.kept() == Saved::input) {
        from = convert<C>(item.saved.lane[i]) * scale + bias[i];
      }
      const C passed = gradient(convert<C>(item.grad.lane[i]), from);
      sum[i] += passed;
      scaled[i] = passed * scale;
    }
    if (problem.grad_x != nullptr)
      store(static_cast<T*>(problem.grad_x) + row * problem.columns + column, scaled);
  }
};

/// Whether rows of grad, of what was saved and of grad_x move by whole vectors.
bool by_vectors(const BiasActBackward& p) {
  const int64_t size = static_cast<int64_t>(size_of(p.dtype));
  const auto in_rows = [&](const void* data, int64_t row_stride, int64_t column_stride) {
    return column_stride == 1 && row_stride * size % kVectorBytes == 0 &&
           aligned(data, kVectorBytes);
  };
  return p.columns * size % kVectorBytes == 0 && aligned(p.grad_x, kVectorBytes) &&
         in_rows(p.grad, p.grad_row_stride, p.grad_column_stride) &&
         (kept_by_bias_act(p.activation) != Saved::input ||
          in_rows(p.saved, p.saved_row_stride, p.saved_column_stride));
}

columns::Plan plan_of(const BiasActBackward& p) {
  const int lanes = by_vectors(p) ? kVectorBytes / static_cast<int>(size_of(p.dtype)) : 1;
  const bool from_input = kept_by_bias_act(p.activation) == Saved::input;
  return columns::make_plan(p.rows, p.columns, lanes,
                            tuning(from_input, size_of(p.dtype), lanes).blocks);
}

template <class T, int Lanes, class Gradient>
Status both_gradients(const BiasActBackward& p, const Gradient& gradient, Allocate allocate,
                      CUstream_st* stream) {
  using Body = GradientBody<Gradient, T, Lanes>;
  const Body body{p, gradient, static_cast<Compute<T>>(p.scale), {}};
  return columns::launch<Body::kTuning.blocks>(body, plan_of(p), allocate, p.grad_bias,
                                               p.bias_dtype, stream);
}

/// Without a bias gradient there is nothing to sum: the elementwise skeleton does it.
template <class T>
Status grad_x_alone(const BiasActBackward& p, CUstream_st* stream) {
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

template <class T, class Bias>
Status forward(const BiasAct& p, CUstream_st* stream) {
  using C = Compute<T>;
  using Math = MathFor<T>;
  const C scale = static_cast<C>(p.scale);
  if (p.signs != nullptr) {
    // Relu alone saves signs.
    const BiasActivated<Relu, Math, C> functor{scale};
    const WithSigns<BiasActivated<Relu, Math, C>, T> body{functor, p.signs};
    return elementwise::launch_bodies<T, T, Bias>(body, body, p.elements, stream);
  }
  return elementwise::launch_activated<T, T, Bias>(
      p.activation, elementwise::MakeScaled<BiasActivated, Math, C>{scale}, p.elements, stream);
}

}  // namespace

Status bias_act(const BiasAct& p, CUstream_st* stream) {
  return dispatch_floating(p.elements.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return with_parameter_type<T>(p.elements.in_dtype[1], [&](auto bias) {
      return forward<T, typename decltype(bias)::type>(p, stream);
    });
  });
}

Status bias_act_backward(const BiasActBackward& p, Allocate allocate, CUstream_st* stream) {
  if (p.columns == 0) return {};
  return dispatch_floating(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using Math = MathFor<T>;
    if (p.grad_bias == nullptr) return grad_x_alone<T>(p, stream);
    const Chosen<Math> chosen{p.activation, kept_by_bias_act(p.activation)};
    if (!by_vectors(p)) return both_gradients<T, 1>(p, chosen, allocate, stream);
    constexpr int kLanes = kVectorLanes<T>;
    // The long code of double precision is not repeated for every activation.
    if constexpr (sizeof(T) == 8) {
      return both_gradients<T, kLanes>(p, chosen, allocate, stream);
    } else {
      Status status{"unknown activation"};
      with_activation(
          p.activation,
          [&](auto act) {
            const Fixed<typename decltype(act)::type, Math> gradient;
            status = both_gradients<T, kLanes>(p, gradient, allocate, stream);
          },
          Activations{});
      return status;
    }
  });
}

}  // namespace torchkiln::cuda
