// add and muladd, with torch's rules of broadcasting and promotion (detail/elementwise_operands.h).
// Numbers are passed as arguments of the kernels, so that they are not copied to the GPU.

#include "torchkiln/kernels/pointwise.h"

#include <ATen/ScalarOps.h>

#include <numeric>
#include <vector>

#include "detail/elementwise_operands.h"
#include "torchkiln/torch/elementwise.h"
#include "torchkiln/torch/empty.h"
#include "torchkiln/torch/op.h"
#include "torchkiln/torch/ops.h"

namespace torchkiln::pointwise_ops {
namespace {

using at::Tensor;
using Two = std::tuple<Tensor, Tensor>;

/// out = input * factor + shift, with the numbers as arguments of the kernel.
void scale_shift(const char* op, const Tensor& out, const Tensor& input, double factor,
                 double shift) {
  launch_elementwise(
      op, std::array{out}, std::array{readable(input, out)},
      [&](const auto& p, auto stream) { return cuda::scale_shift(p, factor, shift, stream); },
      [&](const auto& p, int64_t begin, int64_t end) {
        return cpu::scale_shift(p, factor, shift, begin, end);
      });
}

double number_in(const Tensor& scalar) { return scalar.item().toDouble(); }

struct Add {
  static constexpr const char* kSchema = "torchkiln::add(Tensor a, Tensor b) -> Tensor";
  static constexpr bool kTakesNumbers = true;

  static Tensor meta(const Tensor& a, const Tensor& b) {
    const Operands operands{{"a", a}, {"b", b}};
    return broadcast_output("add", operands, check_promotion("add", operands));
  }

  static Tensor kernel(const Tensor& a, const Tensor& b) {
    Tensor out = meta(a, b);
    if (out.numel() == 0) return out;
    if (out.is_cuda() && (is_cpu_scalar(a) || is_cpu_scalar(b))) {
      const bool a_is_number = is_cpu_scalar(a);
      scale_shift("add", out, a_is_number ? b : a, 1.0, number_in(a_is_number ? a : b));
      return out;
    }
    launch_elementwise(
        "add", std::array{out}, std::array{readable(a, out), readable(b, out)},
        [](const auto& p, auto stream) { return cuda::add(p, stream); }, cpu::add);
    return out;
  }

  static Tensor composite(const Tensor& a, const Tensor& b) {
    check_promotion("add", {{"a", a}, {"b", b}});
    check_broadcast("add", {{"a", a}, {"b", b}});
    return at::add(a, b);
  }

  static Tensor recorded(const Below& below, const Tensor& a, const Tensor& b) {
    // Autograd's engine sums each gradient over broadcast dimensions and casts it to its input's
    // dtype.
    return record("add", {a, b}, below.call<Add>(a, b), keep(),
                  [](const Incoming& in, const Kept<0>&) { return variable_list{in[0], in[0]}; });
  }
};

/// The gradients of a * b for a and b of the shape and dtype of grad, without broadcasting.
struct MuladdBackward {
  static constexpr const char* kSchema =
      "torchkiln::_muladd_backward(Tensor grad, Tensor a, Tensor b) -> (Tensor, Tensor)";
  static constexpr const char* kName = "muladd_backward";

  static Two meta(const Tensor& grad, const Tensor& a, const Tensor& b) {
    check_dtype(kName, "grad", grad);
    check_like(kName, "a", a, "grad", grad);
    check_like(kName, "b", b, "grad", grad);
    return {empty_in_layout_of(a), empty_in_layout_of(b)};
  }

  static Two kernel(const Tensor& grad, const Tensor& a, const Tensor& b) {
    auto [grad_a, grad_b] = meta(grad, a, b);
    launch_elementwise(
        kName, std::array{grad_a, grad_b}, std::array{grad, a, b},
        [](const auto& p, auto stream) { return cuda::multiply_gradient(p, stream); },
        cpu::multiply_gradient);
    return {grad_a, grad_b};
  }
};

struct Muladd {
  static constexpr const char* kSchema =
      "torchkiln::muladd(Tensor a, Tensor b, Tensor c) -> Tensor";
  static constexpr const char* kName = "muladd";
  static constexpr bool kTakesNumbers = true;

  static Tensor meta(const Tensor& a, const Tensor& b, const Tensor& c) {
    const Operands operands{{"a", a}, {"b", b}, {"c", c}};
    return broadcast_output(kName, operands, checked_dtype(operands));
  }

  /// Checks devices and dtypes. Returns the dtype to which the product a * b and c promote. It may
  /// differ from the promoted dtype of all three, because the product has dimensions if a or b has.
  static at::ScalarType checked_dtype(Operands operands) {
    check_devices(kName, operands);
    const Operand *const a = operands.begin(), *const b = a + 1, *const c = a + 2;
    at::native::ResultTypeState product = promotion_state({*a, *b});
    const at::ScalarType dtype = at::native::result_type(product);
    if (a->tensor.dim() > 0 || b->tensor.dim() > 0) {
      product = {dtype, at::ScalarType::Undefined, at::ScalarType::Undefined};
    } else if (product.zeroResult != at::ScalarType::Undefined) {
      product.zeroResult = dtype;
    }
    const at::ScalarType result =
        at::native::result_type(at::native::update_result_type_state(c->tensor, product));
    check_promoted(kName, operands, result);
    return result;
  }

  /// CPU scalars are passed to the kernels by value.
  static Tensor kernel(const Tensor& a, const Tensor& b, const Tensor& c) {
    Tensor out = meta(a, b, c);
    if (out.numel() == 0) return out;
    const bool b_first = is_cpu_scalar(a) && !is_cpu_scalar(b);
    const Tensor& x = b_first ? b : a;
    const Tensor& y = b_first ? a : b;
    const bool y_is_number = is_cpu_scalar(y), c_is_number = is_cpu_scalar(c);
    if (is_cpu_scalar(x) && !c_is_number) {
      scale_shift(kName, out, c, 1.0, number_in(x) * number_in(y));
    } else if (y_is_number && c_is_number && !is_cpu_scalar(x)) {
      scale_shift(kName, out, x, number_in(y), number_in(c));
    } else if (y_is_number && !c_is_number) {
      const double factor = number_in(y);
      launch_elementwise(
          kName, std::array{out}, std::array{readable(x, out), readable(c, out)},
          [&](const auto& p, auto stream) { return cuda::scale_add(p, factor, stream); },
          [&](const auto& p, int64_t begin, int64_t end) {
            return cpu::scale_add(p, factor, begin, end);
          });
    } else if (c_is_number && !y_is_number) {
      const double shift = number_in(c);
      launch_elementwise(
          kName, std::array{out}, std::array{readable(x, out), readable(y, out)},
          [&](const auto& p, auto stream) { return cuda::multiply_shift(p, shift, stream); },
          [&](const auto& p, int64_t begin, int64_t end) {
            return cpu::multiply_shift(p, shift, begin, end);
          });
    } else {
      launch_elementwise(
          kName, std::array{out}, std::array{readable(x, out), readable(y, out), readable(c, out)},
          [](const auto& p, auto stream) { return cuda::multiply_add(p, stream); },
          cpu::multiply_add);
    }
    return out;
  }

  static Tensor composite(const Tensor& a, const Tensor& b, const Tensor& c) {
    const Operands operands{{"a", a}, {"b", b}, {"c", c}};
    const at::ScalarType dtype = checked_dtype(operands);
    check_broadcast(kName, operands);
    const at::ScalarType compute = compute_dtype(dtype);
    return plus(times(a, b, compute), c, compute).to(dtype);
  }

  /// The product and the sum with torch's ops. A wrapped number is passed to them as a number.
  static Tensor times(const Tensor& a, const Tensor& b, at::ScalarType compute) {
    const auto x = number_of(a), y = number_of(b);
    if (x && y) return at::native::wrapped_scalar_tensor(*x * *y);
    if (y) return a.to(compute).mul(*y);
    return x ? b.to(compute).mul(*x) : a.to(compute) * b.to(compute);
  }
  static Tensor plus(const Tensor& product, const Tensor& c, at::ScalarType compute) {
    if (const auto shift = number_of(c)) return product.to(compute).add(*shift);
    const auto shift = number_of(product);
    return shift ? c.to(compute).add(*shift) : product + c.to(compute);
  }

  static bool is_number(const Tensor& tensor) {
    return tensor.unsafeGetTensorImpl()->is_wrapped_number();
  }

  /// The value of a wrapped number, read without the dispatcher, so that no mode intercepts it.
  static std::optional<double> number_of(const Tensor& tensor) {
    if (!is_number(tensor) || !tensor.has_storage()) return std::nullopt;
    if (tensor.scalar_type() == at::kBool) return *tensor.const_data_ptr<bool>() ? 1.0 : 0.0;
    if (tensor.scalar_type() == at::kLong)
      return static_cast<double>(*tensor.const_data_ptr<int64_t>());
    return *tensor.const_data_ptr<double>();
  }

  /// grad, or its sum over the dimensions that only c has, in the dtype of the computation.
  static Tensor sum_to_product(const Tensor& grad, c10::SymIntArrayRef shape) {
    if (grad.sym_sizes().equals(shape)) return grad;
    const int64_t added = grad.dim() - static_cast<int64_t>(shape.size());
    std::vector<int64_t> dims(added);
    std::iota(dims.begin(), dims.end(), 0);
    for (int64_t d = added; d < grad.dim(); ++d)
      if (shape[d - added] == 1 && grad.sym_size(d) != 1) dims.push_back(d);
    return grad.sum(dims, /*keepdim=*/true, compute_dtype(grad.scalar_type()))
        .reshape_symint(shape);
  }

  static Tensor recorded(const Below& below, const Tensor& a, const Tensor& b, const Tensor& c) {
    const Tensor out = below.call<Muladd>(a, b, c);
    const bool of_product = a.requires_grad() || b.requires_grad();
    const auto shape = at::infer_size_symdimvector(a.sym_sizes(), b.sym_sizes());
    return record(kName, {a, b, c}, out,
                  keep(of_product ? a : Tensor(), a.requires_grad() ? b : Tensor()),
                  [shape](const Incoming& in, const Kept<2>& kept) {
                    const Tensor& grad = in[0];
                    const auto is_like_grad = [&](const Tensor& tensor) {
                      return tensor.scalar_type() == grad.scalar_type() &&
                             tensor.sym_sizes().equals(grad.sym_sizes());
                    };
                    Tensor grad_a, grad_b;
                    if (in.wants(0) && in.wants(1) && !in.needs_composite() &&
                        is_like_grad(kept[0]) && is_like_grad(kept[1])) {
                      std::tie(grad_a, grad_b) = call_below<MuladdBackward>(grad, kept[0], kept[1]);
                    } else {
                      // If only c is larger, summing first saves multiplications. The engine rounds
                      // once, after its own sums.
                      const Tensor narrow = sum_to_product(grad, shape);
                      if (in.wants(0)) grad_a = narrow * kept[1];
                      if (in.wants(1)) grad_b = narrow * kept[0];
                    }
                    return variable_list{grad_a, grad_b, grad};
                  });
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) { define<Add, MuladdBackward, Muladd>(m); }

}  // namespace torchkiln::pointwise_ops

namespace torchkiln {

at::Tensor add(const at::Tensor& a, const at::Tensor& b) { return call<pointwise_ops::Add>(a, b); }

at::Tensor muladd(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c) {
  using pointwise_ops::Muladd;
  // A transform of torch.func wraps the operands of an op but cannot wrap numbers. torch's own ops
  // support both.
  if (is_transformed() && (Muladd::is_number(a) || Muladd::is_number(b) || Muladd::is_number(c)))
    return Muladd::composite(a, b, c);
  return call<Muladd>(a, b, c);
}

}  // namespace torchkiln
