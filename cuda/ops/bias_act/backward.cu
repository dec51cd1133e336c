// grad_x = grad * activation'(x * scale + bias) * scale, and the gradient of the bias, the sum over
// the rows, in the same pass: a body for the column reduction in detail/reduce/columns.cuh.
//
//   plan           kernel                       when
//   elementwise    backward_elementwise.cu      no gradient of the bias is wanted
//   one row        backward_elementwise.cu      one long row, whose gradients are written one after
//                                               the other
//   vectors        sum_columns, 16-byte loads   all rows are whole 16-byte vectors
//   elements       sum_columns, single loads    otherwise
//
// A second, short kernel adds partial sums if several blocks share a column. forward.cu computes
// out.

#include "backward.cuh"
#include "choose.h"
#include "detail/reduce/columns.cuh"
#include "torchkiln/core/activations.h"

namespace torchkiln::cuda {

using namespace device;
using namespace reduce;
namespace {

/// The derivative of an activation that is a template parameter.
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
  static constexpr BiasActTuning kTuning = bias_act_tuning(Gradient::kFromInput, sizeof(T), Lanes);
  static constexpr int kRowsInFlight = kTuning.rows;

  struct Item {
    Vec<T, Lanes> grad;
    Vec<T, Lanes> saved;
    uint32_t signs;
  };

  BiasActBackward problem;
  Gradient gradient;
  C scale;
  C bias[Lanes];  // for the thread's columns; zeros if there is no bias

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

template <class T, int Lanes, class Gradient>
Status launch_gradients(const BiasActBackward& p, const BiasActPlan& plan, const Gradient& gradient,
                        Allocate allocate, CUstream_st* stream) {
  using Body = GradientBody<Gradient, T, Lanes>;
  const Body body{p, gradient, static_cast<Compute<T>>(p.scale), {}};
  return columns::launch<Body::kTuning.blocks>(body, plan.columns, allocate, p.grad_bias,
                                               p.bias_dtype, stream);
}

/// Both gradients of one row. They are equal if the scale is 1.
Status of_one_row(const BiasActBackward& p, CUstream_st* stream) {
  const bool equal = p.scale == 1 && p.grad_x != nullptr;
  if (p.grad_x != nullptr) {
    const Status status = bias_act_grad_x(p, stream);
    if (!status.ok()) return status;
  }
  if (equal) return columns::copy_row(p.grad_bias, p.grad_x, p.columns, p.dtype, stream);
  BiasActBackward unscaled = p;
  unscaled.grad_x = p.grad_bias;
  unscaled.scale = 1;
  return bias_act_grad_x(unscaled, stream);
}

}  // namespace

Status bias_act_backward(const BiasActBackward& p, Allocate allocate, CUstream_st* stream) {
  if (p.columns == 0) return {};
  const std::optional<BiasActPlan> plan = choose(p, current_device());
  if (!plan) return bias_act_grad_x(p, stream);
  if (plan->one_row) return of_one_row(p, stream);
  return dispatch_floating(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using Math = MathFor<T>;
    const Saved kept = kept_by_bias_act(p.activation);
    const SelectedDerivative<Math> chosen{p.activation, kept};
    constexpr int kLanes = kVectorLanes<T>;
    Status status{"unknown activation"};
    const auto launch_fixed = [&](auto list, auto lanes) {
      with_activation(
          p.activation,
          [&](auto act) {
            const FixedDerivative<typename decltype(act)::type, Math> gradient;
            status = launch_gradients<T, lanes()>(p, *plan, gradient, allocate, stream);
          },
          list);
      return status;
    };
    if (plan->lanes == 1) {
      // For single elements, one kernel selects between all derivatives that read x.
      if (kept == Saved::input) return launch_gradients<T, 1>(p, *plan, chosen, allocate, stream);
      return launch_fixed(TypeList<None, Relu>{}, std::integral_constant<int, 1>{});
    }
    // For float64, one kernel selects between all activations, because their code is long.
    if constexpr (sizeof(T) == 8) {
      return launch_gradients<T, kLanes>(p, *plan, chosen, allocate, stream);
    } else {
      return launch_fixed(Activations{}, std::integral_constant<int, kLanes>{});
    }
  });
}

}  // namespace torchkiln::cuda
