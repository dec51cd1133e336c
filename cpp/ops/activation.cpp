// The activation ops, one per activation, their in-place forms, and activation_backward, which
// other ops call as well. Forward saves x, or the output if the derivative is a function of the
// output. The list of activations is in torchkiln/core/activations.h.

#include "torchkiln/kernels/activation.h"

#include <ATen/MemoryOverlap.h>

#include "detail/composite_activations.h"
#include "torchkiln/torch/checks.h"
#include "torchkiln/torch/elementwise.h"
#include "torchkiln/torch/empty.h"
#include "torchkiln/torch/ops.h"

namespace torchkiln {

at::Tensor ActivationBackward::meta(const at::Tensor& grad, const at::Tensor& saved, Activation) {
  constexpr const char* kName = "activation_backward";
  check_tensor(kName, "grad", grad);
  check_dtype(kName, "grad", grad);
  check_like(kName, "saved", saved, "grad", grad);
  return empty_in_layout_of(saved);
}

at::Tensor ActivationBackward::kernel(const at::Tensor& grad, const at::Tensor& saved,
                                      Activation act) {
  at::Tensor out = meta(grad, saved, act);
  launch_elementwise(
      "activation_backward", std::array{out}, std::array{grad, saved},
      [&](const auto& p, auto stream) { return cuda::activation_backward(p, act, stream); },
      [&](const auto& p, int64_t begin, int64_t end) {
        return cpu::activation_backward(p, act, begin, end);
      });
  return out;
}

void write_gradient_and_output(const at::Tensor& grad, const at::Tensor& x, Activation activation,
                               const at::Tensor& to) {
  launch_elementwise(
      "activation_backward", std::array{to, grad}, std::array{grad, x},
      [&](const auto& p, auto stream) {
        return cuda::activation_backward_with_output(p, activation, stream);
      },
      [](const auto&, int64_t, int64_t) { return Status{"a CPU has no kernel for both results"}; });
}

void run_activation(const char* op, Activation activation, const at::Tensor& out,
                    const at::Tensor& x) {
  launch_elementwise(
      op, std::array{out}, std::array{x},
      [&](const auto& p, auto stream) { return cuda::activation(p, activation, stream); },
      [&](const auto& p, int64_t begin, int64_t end) {
        return cpu::activation(p, activation, begin, end);
      });
}

}  // namespace torchkiln

namespace torchkiln::activation_ops {
namespace {

using at::Tensor;

/// The activations that have an in-place op, as in torch.
using InPlaceFunctions = TypeList<Square, Relu, Silu, Sigmoid, Tanh>;

/// "torchkiln::relu(Tensor x) -> Tensor", or "torchkiln::relu_(Tensor(a!) x) -> Tensor(a!)".
template <class Act, bool kInPlace>
constexpr auto kSchemaOf = [] {
  std::array<char, 64> schema{};
  size_t at = 0;
  const char* const parts[] = {"torchkiln::", Act::kName,
                               kInPlace ? "_(Tensor(a!) x) -> Tensor(a!)" : "(Tensor x) -> Tensor"};
  for (const char* part : parts)
    while (*part != 0) schema[at++] = *part++;
  return schema;
}();

void check_input(const char* op, const Tensor& x) {
  check_tensor(op, "x", x);
  check_dtype(op, "x", x);
}

/// The activation with torch's own ops, computed in the compute dtype.
Tensor composite_value(Activation activation, const Tensor& x) {
  return composite_activation(activation, x.to(compute_dtype(x.scalar_type()))).to(x.scalar_type());
}

/// The gradient of x. `saved` is x, or the output if the derivative is a function of the output.
variable_list gradients(const Incoming& in, Activation act, const Tensor& saved) {
  if (!in.needs_composite()) return {call_below<ActivationBackward>(in[0], saved, act)};
  if (saved_by(act) == Saved::input) {
    return composite_gradients(
        in, keep(saved), [&](const Kept<1>& inputs) { return composite_value(act, inputs[0]); });
  }
  const at::ScalarType compute = compute_dtype(in[0].scalar_type());
  const Tensor grad = in[0].to(compute), y = saved.to(compute);
  const Tensor wide = act == kActivation<Relu>      ? at::threshold_backward(grad, y, 0)
                      : act == kActivation<Sigmoid> ? at::sigmoid_backward(grad, y)
                                                    : at::tanh_backward(grad, y);
  return {wide.to(in[0].scalar_type())};
}

template <class Act>
struct Function {
  static constexpr const char* kSchema = kSchemaOf<Act, false>.data();

  static Tensor meta(const Tensor& x) {
    check_input(Act::kName, x);
    return empty_in_layout_of(x);
  }

  static Tensor kernel(const Tensor& x) {
    Tensor out = meta(x);
    run_activation(Act::kName, kActivation<Act>, out, x);
    return out;
  }

  static Tensor composite(const Tensor& x) {
    check_input(Act::kName, x);
    return composite_value(kActivation<Act>, x);
  }

  static Tensor recorded(const Below& below, const Tensor& x) {
    const Tensor out = below.call<Function>(x);
    return record(Act::kName, {x}, out, keep(Act::kSaved == Saved::input ? x : out),
                  [](const Incoming& in, const Kept<1>& kept) {
                    return gradients(in, kActivation<Act>, kept[0]);
                  });
  }
};

template <class Act>
struct InPlace {
  static constexpr const char* kSchema = kSchemaOf<Act, true>.data();

  static void check(const Tensor& x) {
    check_input(name_of_op<InPlace>(), x);
    at::assert_no_internal_overlap(x);
  }

  static Tensor& meta(Tensor& x) {
    check(x);
    return x;
  }

  static Tensor& kernel(Tensor& x) {
    check(x);
    if (x.dim() > kMaxRank && !x.is_non_overlapping_and_dense()) {
      x.copy_(Function<Act>::kernel(x));  // more dimensions than a Layout has
    } else {
      run_activation(name_of_op<InPlace>(), kActivation<Act>, x, x);
    }
    return x;
  }

  static Tensor& composite(Tensor& x) {
    check_input(name_of_op<InPlace>(), x);
    return x.copy_(composite_value(kActivation<Act>, x.clone()));  // derivatives read the old x
  }

  static Tensor& recorded(const Below& below, Tensor& x) {
    check(x);
    torch::autograd::check_inplace(x, /*requires_grad=*/true);
    // clone() is recorded, so second derivatives reach the input.
    const Tensor input = Act::kSaved == Saved::input ? x.clone() : x;
    const auto before = torch::autograd::impl::gradient_edge(x);
    below.call<InPlace>(x);
    torch::autograd::increment_version(x);
    record_in_place(Act::kName, x, before, input, [](const Incoming& in, const Kept<1>& kept) {
      return gradients(in, kActivation<Act>, kept[0]);
    });
    return x;
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) {
  define<ActivationBackward>(m);
  for_each_activation(
      [&](auto tag) {
        using Act = typename decltype(tag)::type;
        if constexpr (!std::is_same_v<Act, None>) define<Function<Act>>(m);
      },
      Activations{});
  for_each_activation([&](auto tag) { define<InPlace<typename decltype(tag)::type>>(m); },
                      InPlaceFunctions{});
}

}  // namespace torchkiln::activation_ops

namespace torchkiln {

at::Tensor activation(const at::Tensor& x, c10::string_view act) {
  at::Tensor out = x;
  with_activation(
      find_activation("activation", act),
      [&](auto tag) {
        using Act = typename decltype(tag)::type;
        if constexpr (!std::is_same_v<Act, None>) out = call<activation_ops::Function<Act>>(x);
      },
      Activations{});
  return out;
}

at::Tensor& activation_(at::Tensor& x, c10::string_view act) {
  with_activation(
      find_activation("activation_", act, activation_ops::InPlaceFunctions{}),
      [&](auto tag) { call<activation_ops::InPlace<typename decltype(tag)::type>>(x); },
      activation_ops::InPlaceFunctions{});
  return x;
}

}  // namespace torchkiln
