// softmax and log_softmax, with a scale, a mask and a causal mask. Forward saves the result, from
// which backward computes the gradient. A floating mask, or a result of another dtype, takes a
// separate pass. view.h has the tensors and the mask in the form that kernels read.

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

/// The arguments of forward.
struct Call {
  Borrowed<Tensor> x;
  int64_t dim;
  double scale = 1.0;
  Borrowed<MaybeTensor> mask;
  bool causal = false;
  std::optional<at::ScalarType> dtype;

  TORCHKILN_FIELDS(self.x, self.dim, self.scale, self.mask, self.causal, self.dtype);
};

/// The arguments of backward.
struct BackwardCall {
  Borrowed<Tensor> grad, y;
  int64_t dim;
  bool log;
  double scale;
  Borrowed<MaybeTensor> mask;
  bool causal;

  TORCHKILN_FIELDS(self.grad, self.y, self.dim, self.log, self.scale, self.mask, self.causal);
};

/// Fewest rows per CPU thread. With fewer, starting a thread takes longer than its work.
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
                    ", expected ", rank - 1, ", the last dimension of ", name, ": the keys");
  if (!mask.has_value()) return;
  TORCH_CHECK(
      mask->scalar_type() == at::kBool, "torchkiln.", op, ": mask: got dtype ",
      dtype_name(mask->scalar_type()),
      ", expected bool (true: the element takes part) or a floating dtype (numbers to add)");
  check_mask_shape(op, name, tensor, *mask);
}

/// The arguments that the kernels of forward and backward share. If the mask is copied, `mask` owns
/// the copy.
template <class Problem, class Call>
Problem problem_of(const SoftmaxView& view, bool log, const Call& call, int64_t dim,
                   MaybeTensor& mask, const Tensor& tensor) {
  Problem problem{};
  problem.dtype = dtype_of(tensor);
  problem.log = log;
  problem.scale = call.scale;
  problem.outer = view.outer;
  problem.length = view.length;
  problem.inner = view.inner;
  problem.outer_stride = view.outer_stride;
  problem.stride = view.stride;
  problem.inner_stride = view.inner_stride;
  mask = call.mask;
  problem.mask = describe_mask(tensor, dim, mask, call.causal);
  return problem;
}

/// Sets the mask of a call on tensors like `tensor`, after dimension `dim` is moved to the end.
/// `mask` owns the memory.
template <class Call>
void put_dim_last(Call& call, MaybeTensor& mask, const Tensor& tensor, int64_t dim) {
  mask = call.mask->expand(tensor.sizes()).movedim(dim, -1);
  call.mask = mask;
  call.dim = -1;
  call.causal = false;
}

struct Backward {
  static constexpr bool kFlexibleLayout = true;
  static constexpr const char* kSchema =
      "torchkiln::_softmax_backward(Tensor grad, Tensor y, int dim, bool log, float scale, "
      "Tensor? mask, bool causal) -> Tensor";
  static constexpr const char* kName = "softmax_backward";

  static Tensor meta(const BackwardCall& call) {
    const Tensor& grad = call.grad;
    check_tensor(kName, "grad", grad);
    check_dtype(kName, "grad", grad);
    check_like(kName, "y", call.y, "grad", grad);
    check_mask(kName, "grad", grad, check_dim(kName, "grad", grad, call.dim), call.mask,
               call.causal);
    return empty_contiguous(grad);
  }

  static Tensor kernel(const BackwardCall& call) {
    Tensor grad_x = meta(call);
    const Tensor& grad = call.grad;
    if (grad.numel() == 0) return grad_x;
    const int64_t at = check_dim(kName, "grad", grad, call.dim);
    if (call.mask && has_inner(grad, at)) {
      const Tensor moved_grad = grad.movedim(at, -1), moved_y = call.y->movedim(at, -1);
      MaybeTensor mask;
      BackwardCall moved = call;
      put_dim_last(moved, mask, grad, at);
      moved.grad = moved_grad;
      moved.y = moved_y;
      return kernel(moved).movedim(-1, at).contiguous();
    }
    // For few elements, reading them where they are not adjacent takes less time than launching a
    // copy.
    const SoftmaxView view = view_of_rows(grad, at, /*copies=*/grad.numel() >= 1 << 16);
    const auto saved = call.y->expect_contiguous();
    MaybeTensor kept;
    auto arguments = problem_of<SoftmaxBackward>(view, call.log, call, at, kept, grad);
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

/// A bool tensor: true where an element is masked out. Undefined without a mask.
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
Tensor composite_gradient(const BackwardCall& call) {
  const Tensor& grad = call.grad;
  const at::ScalarType compute = compute_dtype(grad.scalar_type());
  const Tensor wide = grad.to(compute);
  const Tensor saved = call.y->to(compute);
  Tensor grad_x = call.log ? wide - saved.exp() * at::sum(wide, call.dim, /*keepdim=*/true)
                           : (wide - at::sum(wide * saved, call.dim, /*keepdim=*/true)) * saved;
  const Tensor out = left_out(grad, call.mask, call.causal);
  if (out.defined()) grad_x = grad_x.masked_fill(out, 0);
  return (grad_x * call.scale).to(grad.scalar_type());
}

template <bool kLog>
struct Schema {
  static constexpr bool kFlexibleLayout = true;
  static constexpr const char* kSchema =
      "torchkiln::softmax(Tensor x, int dim, *, float scale=1.0, Tensor? mask=None, "
      "bool causal=False, ScalarType? dtype=None) -> Tensor";
};
template <>
struct Schema<true> {
  static constexpr bool kFlexibleLayout = true;
  static constexpr const char* kSchema =
      "torchkiln::log_softmax(Tensor x, int dim, *, float scale=1.0, Tensor? mask=None, "
      "bool causal=False, ScalarType? dtype=None) -> Tensor";
};

template <bool kLog>
struct Op : Schema<kLog> {
  static const char* name() { return name_of_op<Op>(); }

  static int64_t check(const Call& call) {
    check_tensor(name(), "x", call.x);
    check_dtype(name(), "x", call.x);
    const int64_t at = check_dim(name(), "x", call.x, call.dim);
    check_mask(name(), "x", call.x, at, call.mask, call.causal);
    return at;
  }

  /// Casts x to a given dtype first, as torch does, and adds a floating mask. Both are separate
  /// ops, so autograd computes the gradients of x and of the mask through them.
  static std::optional<Tensor> rewritten(const Call& call) {
    const MaybeTensor& mask = call.mask;
    const bool adds = mask.has_value() && mask->defined() && mask->is_floating_point();
    if (!call.dtype && !adds) return std::nullopt;
    check_tensor(name(), "x", call.x);
    if (!call.dtype) check_dtype(name(), "x", call.x);
    TORCH_CHECK(!call.dtype || is_supported_dtype(*call.dtype), "torchkiln.", name(),
                ": dtype: got ", dtype_name(*call.dtype), ", expected ", kSupportedDtypes);
    Call rest = call;
    rest.dtype = std::nullopt;
    Tensor x = call.dtype ? call.x->to(*call.dtype) : *call.x;
    rest.x = x;
    if (!adds) return torchkiln::call<Op>(rest);
    check_mask_shape(name(), "x", call.x, *mask);
    trace::note("a pass more: adds the mask, which has numbers");
    x = muladd(x, at::native::wrapped_scalar_tensor(call.scale), *mask);
    rest.scale = 1;
    rest.mask = Borrowed<MaybeTensor>();
    return torchkiln::call<Op>(rest);
  }

  static Tensor meta(const Call& call) {
    check(call);
    return empty_contiguous(call.x);
  }

  static Tensor kernel(const Call& call) {
    const int64_t at = check(call);
    const Tensor& x = call.x;
    if (call.mask && has_inner(x, at)) {
      trace::note("with a mask dimension ", at, " goes last: the kernels mask adjacent elements");
      const Tensor moved_x = x.movedim(at, -1);
      MaybeTensor mask;
      Call moved = call;
      put_dim_last(moved, mask, x, at);
      moved.x = moved_x;
      return kernel(moved).movedim(-1, at).contiguous();
    }
    Tensor y = empty_contiguous(x);
    if (x.numel() == 0) return y;
    const SoftmaxView view = view_of_rows(x, at, /*copies=*/false);
    MaybeTensor kept;
    auto arguments = problem_of<Softmax>(view, kLog, call, at, kept, x);
    arguments.x = view.tensor->const_data_ptr();
    arguments.y = y.data_ptr();
    launch_allocating(
        name(), x, view.outer * view.inner, row_grain(view.length),
        [&](Allocate allocate, auto stream) { return cuda::softmax(arguments, allocate, stream); },
        [&](int64_t begin, int64_t end) { return cpu::softmax(arguments, begin, end); });
    return y;
  }

  static Tensor composite(const Call& call) {
    const int64_t at = check(call);
    const at::ScalarType dtype = call.x->scalar_type();
    Tensor wide = call.x->to(compute_dtype(dtype)) * call.scale;
    const Tensor out = left_out(call.x, call.mask, call.causal);
    if (out.defined()) wide = wide.masked_fill(out, -std::numeric_limits<double>::infinity());
    return (kLog ? at::log_softmax(wide, at) : at::softmax(wide, at)).to(dtype);
  }

  static Tensor recorded(const Below& below, const Call& call) {
    const Tensor y = below.call<Op>(call);
    BackwardCall numbers{};
    numbers.dim = check_dim(name(), "x", call.x, call.dim);
    numbers.log = kLog;
    numbers.scale = call.scale;
    numbers.causal = call.causal;
    return record(name(), {*call.x}, y, keep(y, tensor_or_undefined(call.mask)),
                  [numbers](const Incoming& in, const Kept<2>& kept) {
                    const MaybeTensor mask = maybe(kept[1]);
                    BackwardCall backward = numbers;
                    backward.grad = in[0];
                    backward.y = kept[0];
                    backward.mask = mask;
                    return variable_list{in.needs_composite() ? composite_gradient(backward)
                                                              : call_below<Backward>(backward)};
                  });
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) { define<Backward, Op<false>, Op<true>>(m); }

}  // namespace torchkiln::softmax_ops

namespace torchkiln {

at::Tensor softmax(const at::Tensor& x, int64_t dim, const SoftmaxOptions& options) {
  return call<softmax_ops::Op<false>>(x, dim, options);
}

at::Tensor log_softmax(const at::Tensor& x, int64_t dim, const SoftmaxOptions& options) {
  return call<softmax_ops::Op<true>>(x, dim, options);
}

}  // namespace torchkiln
