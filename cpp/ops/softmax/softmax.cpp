#include <ATen/ScalarOps.h>

#include <limits>

#include "softmax/view.h"
#include "torchkiln/torch/checks.h"
#include "torchkiln/torch/empty.h"
#include "torchkiln/torch/launch.h"
#include "torchkiln/torch/op.h"
#include "torchkiln/torch/ops.h"

namespace torchkiln::softmax_ops {
namespace {

using at::Tensor;
using MaybeDtype = std::optional<at::ScalarType>;

/// Fewest rows per CPU thread. With fewer, a thread starts more slowly than it computes.
int64_t row_grain(int64_t length) { return std::max<int64_t>((1 << 13) / length, 1); }

void check_mask_shape(const char* op, const char* name, const Tensor& tensor, const Tensor& mask) {
  check_tensors(op, {{name, tensor}, {"mask", mask}});
  const int64_t missing = tensor.dim() - mask.dim();
  bool fits = missing >= 0;
  for (int64_t d = 0; fits && d < mask.dim(); ++d) {
    fits = mask.sym_size(d) == 1 || mask.sym_size(d) == tensor.sym_size(missing + d);
  }
  TORCH_CHECK(fits, "torchkiln.", op, ": mask: got shape ", mask.sym_sizes(),
              ", expected one that broadcasts to ", tensor.sym_sizes(), ", the shape of ", name);
}

void check_mask(const char* op, const char* name, const Tensor& tensor, int64_t dim,
                const MaybeTensor& mask, bool causal) {
  const int64_t rank = tensor.dim();
  TORCH_CHECK_VALUE(!causal || rank >= 2, "torchkiln.", op, ": causal: got ", name, " with ", rank,
                    " dimensions, expected at least 2, the last of which are [queries, keys]");
  TORCH_CHECK_VALUE(!causal || dim == rank - 1, "torchkiln.", op, ": causal: got dim ", dim,
                    ", expected ", rank - 1, ", the last dimension of ", name,
                    ", that of the keys");
  if (!mask.has_value()) return;
  TORCH_CHECK(mask->scalar_type() == at::kBool, "torchkiln.", op, ": mask: got dtype ",
              dtype_name(mask->scalar_type()),
              ", expected bool, true where an element takes part, or a floating dtype, of numbers "
              "to add");
  check_mask_shape(op, name, tensor, *mask);
}

/// The mask for a tensor whose dimension `dim` is moved to the end.
MaybeTensor with_dim_last(const MaybeTensor& mask, const Tensor& tensor, int64_t dim) {
  if (!mask.has_value()) return std::nullopt;
  return mask->expand(tensor.sizes()).movedim(dim, -1);
}

/// The arguments that forward and backward share. `mask` owns a copy if one is made.
template <class Problem>
Problem problem_of(const SoftmaxView& view, bool log, double scale, int64_t dim, MaybeTensor& mask,
                   bool causal, const Tensor& tensor) {
  Problem problem{};
  problem.dtype = dtype_of(tensor);
  problem.log = log;
  problem.scale = scale;
  problem.outer = view.outer;
  problem.length = view.length;
  problem.inner = view.inner;
  problem.outer_stride = view.outer_stride;
  problem.stride = view.stride;
  problem.inner_stride = view.inner_stride;
  problem.mask = describe_mask(tensor, dim, mask, causal);
  return problem;
}

struct Backward {
  static constexpr const char* kSchema =
      "torchkiln::softmax_backward(Tensor grad, Tensor y, int dim, bool log, float scale, "
      "Tensor? mask, bool causal) -> Tensor";
  static constexpr const char* kName = "softmax_backward";

  static Tensor meta(const Tensor& grad, const Tensor& y, int64_t dim, bool, double,
                     const MaybeTensor& mask, bool causal) {
    check_tensor(kName, "grad", grad);
    check_dtype(kName, "grad", grad);
    check_like(kName, "y", y, "grad", grad);
    check_mask(kName, "grad", grad, check_dim(kName, "grad", grad, dim), mask, causal);
    return empty_contiguous(grad);
  }

  static Tensor kernel(const Tensor& grad, const Tensor& y, int64_t dim, bool log, double scale,
                       const MaybeTensor& mask, bool causal) {
    Tensor grad_x = meta(grad, y, dim, log, scale, mask, causal);
    if (grad.numel() == 0) return grad_x;
    const int64_t at = check_dim(kName, "grad", grad, dim);
    if (mask.has_value() && has_inner(grad, at)) {
      return kernel(grad.movedim(at, -1), y.movedim(at, -1), -1, log, scale,
                    with_dim_last(mask, grad, at), /*causal=*/false)
          .movedim(-1, at)
          .contiguous();
    }
    const SoftmaxView view = view_around(grad, at);
    const auto saved = y.expect_contiguous();
    MaybeTensor kept = mask;
    auto arguments = problem_of<SoftmaxBackward>(view, log, scale, at, kept, causal, grad);
    arguments.grad = view.tensor->const_data_ptr();
    arguments.y = saved->const_data_ptr();
    arguments.grad_x = grad_x.data_ptr();
    launch_allocating(
        kName, grad, view.outer * view.inner, row_grain(view.length),
        [&](Allocate allocate, auto stream) {
          return cuda::softmax_backward(arguments, allocate, stream);
        },
        [&](int64_t begin, int64_t end) { return cpu::softmax_backward(arguments, begin, end); });
    return grad_x;
  }
};

/// True where an element is masked out; undefined without a mask.
Tensor left_out(const Tensor& like, const MaybeTensor& mask, bool causal) {
  Tensor kept;
  if (causal) {
    kept = at::ones_symint({like.sym_size(-2), like.sym_size(-1)}, like.options().dtype(at::kBool))
               .tril();
  }
  if (mask.has_value()) kept = causal ? kept.logical_and(*mask) : *mask;
  return kept.defined() ? kept.logical_not() : kept;
}

/// The gradient of x from y, with torch's own ops.
Tensor composite_gradient(const Tensor& grad, const Tensor& y, int64_t dim, bool log, double scale,
                          const MaybeTensor& mask, bool causal) {
  const at::ScalarType compute = compute_dtype(grad.scalar_type());
  const Tensor wide = grad.to(compute);
  const Tensor saved = y.to(compute);
  Tensor grad_x = log ? wide - saved.exp() * at::sum(wide, dim, /*keepdim=*/true)
                      : (wide - at::sum(wide * saved, dim, /*keepdim=*/true)) * saved;
  const Tensor out = left_out(grad, mask, causal);
  if (out.defined()) grad_x = grad_x.masked_fill(out, 0);
  return (grad_x * scale).to(grad.scalar_type());
}

template <bool kLog>
struct Schema {
  static constexpr const char* kSchema =
      "torchkiln::softmax(Tensor x, int dim, *, float scale=1.0, Tensor? mask=None, "
      "bool causal=False, ScalarType? dtype=None) -> Tensor";
};
template <>
struct Schema<true> {
  static constexpr const char* kSchema =
      "torchkiln::log_softmax(Tensor x, int dim, *, float scale=1.0, Tensor? mask=None, "
      "bool causal=False, ScalarType? dtype=None) -> Tensor";
};

template <bool kLog>
struct Op : Schema<kLog> {
  static const char* name() { return name_of_op<Op>(); }

  static int64_t check(const Tensor& x, int64_t dim, const MaybeTensor& mask, bool causal) {
    check_tensor(name(), "x", x);
    check_dtype(name(), "x", x);
    const int64_t at = check_dim(name(), "x", x, dim);
    check_mask(name(), "x", x, at, mask, causal);
    return at;
  }

  /// Casts x to a given dtype first, as torch does, and adds a floating mask: both in a pass of
  /// their own, which the gradients of x and of the mask take, too.
  static std::optional<Tensor> rewritten(const Tensor& x, int64_t dim, double scale,
                                         const MaybeTensor& mask, bool causal, MaybeDtype dtype) {
    const bool adds = mask.has_value() && mask->defined() && mask->is_floating_point();
    if (!dtype.has_value() && !adds) return std::nullopt;
    check_tensor(name(), "x", x);
    if (!dtype.has_value()) check_dtype(name(), "x", x);
    TORCH_CHECK(!dtype.has_value() || is_supported_dtype(*dtype), "torchkiln.", name(),
                ": dtype: got ", dtype_name(*dtype), ", expected ", kSupportedDtypes);
    const Tensor cast = dtype.has_value() ? x.to(*dtype) : x;
    if (!adds) return call<Op>(cast, dim, scale, mask, causal, std::nullopt);
    check_mask_shape(name(), "x", x, *mask);
    trace::note("a pass more: adds the mask, which has numbers");
    const Tensor sum = muladd(cast, at::native::wrapped_scalar_tensor(scale), *mask);
    return call<Op>(sum, dim, 1.0, std::nullopt, causal, std::nullopt);
  }

  static Tensor meta(const Tensor& x, int64_t dim, double, const MaybeTensor& mask, bool causal,
                     MaybeDtype) {
    check(x, dim, mask, causal);
    return empty_contiguous(x);
  }

  static Tensor kernel(const Tensor& x, int64_t dim, double scale, const MaybeTensor& mask,
                       bool causal, MaybeDtype dtype) {
    const int64_t at = check(x, dim, mask, causal);
    if (mask.has_value() && has_inner(x, at)) {
      trace::note("with a mask dimension ", at, " goes last: the kernels mask adjacent elements");
      return kernel(x.movedim(at, -1), -1, scale, with_dim_last(mask, x, at), /*causal=*/false,
                    dtype)
          .movedim(-1, at)
          .contiguous();
    }
    Tensor y = empty_contiguous(x);
    if (x.numel() == 0) return y;
    const SoftmaxView view = view_around(x, at);
    MaybeTensor kept = mask;
    auto arguments = problem_of<Softmax>(view, kLog, scale, at, kept, causal, x);
    arguments.x = view.tensor->const_data_ptr();
    arguments.y = y.data_ptr();
    launch_allocating(
        name(), x, view.outer * view.inner, row_grain(view.length),
        [&](Allocate allocate, auto stream) { return cuda::softmax(arguments, allocate, stream); },
        [&](int64_t begin, int64_t end) { return cpu::softmax(arguments, begin, end); });
    return y;
  }

  static Tensor composite(const Tensor& x, int64_t dim, double scale, const MaybeTensor& mask,
                          bool causal, MaybeDtype) {
    const int64_t at = check(x, dim, mask, causal);
    Tensor wide = x.to(compute_dtype(x.scalar_type())) * scale;
    const Tensor out = left_out(x, mask, causal);
    if (out.defined()) wide = wide.masked_fill(out, -std::numeric_limits<double>::infinity());
    return (kLog ? at::log_softmax(wide, at) : at::softmax(wide, at)).to(x.scalar_type());
  }

  static Tensor recorded(const Below& below, const Tensor& x, int64_t dim, double scale,
                         const MaybeTensor& mask, bool causal, MaybeDtype dtype) {
    const Tensor y = below.call<Op>(x, dim, scale, mask, causal, dtype);
    return record(
        name(), {x}, y, keep(y, tensor_or_undefined(mask)),
        [at = check_dim(name(), "x", x, dim), scale, causal](const Incoming& in,
                                                             const Kept<2>& kept) {
          const auto gradient = in.needs_composite() ? composite_gradient : call_below_backward;
          return variable_list{gradient(in[0], kept[0], at, kLog, scale, maybe(kept[1]), causal)};
        });
  }

  static Tensor call_below_backward(const Tensor& grad, const Tensor& y, int64_t dim, bool log,
                                    double scale, const MaybeTensor& mask, bool causal) {
    return call_below<Backward>(grad, y, dim, log, scale, mask, causal);
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) { define<Backward, Op<false>, Op<true>>(m); }

}  // namespace torchkiln::softmax_ops

namespace torchkiln {

at::Tensor softmax(const at::Tensor& x, int64_t dim, double scale,
                   const std::optional<at::Tensor>& mask, bool causal,
                   std::optional<at::ScalarType> dtype) {
  return call<softmax_ops::Op<false>>(x, dim, scale, mask, causal, dtype);
}

at::Tensor log_softmax(const at::Tensor& x, int64_t dim, double scale,
                       const std::optional<at::Tensor>& mask, bool causal,
                       std::optional<at::ScalarType> dtype) {
  return call<softmax_ops::Op<true>>(x, dim, scale, mask, causal, dtype);
}

}  // namespace torchkiln
