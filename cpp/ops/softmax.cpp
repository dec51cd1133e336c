#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <limits>

#include "softmax_view.h"
#include "torchkiln/autograd.h"
#include "torchkiln/checks.h"
#include "torchkiln/launch.h"
#include "torchkiln/ops.h"

namespace torchkiln::softmax_ops {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using MaybeTensor = std::optional<Tensor>;
using Schema = Tensor(const Tensor&, int64_t, double, const MaybeTensor&, bool);
using BackwardSchema = Tensor(const Tensor&, const Tensor&, int64_t, bool, double,
                              const MaybeTensor&, bool);

constexpr const char* kBackwardOp = "softmax_backward";

/// Elements of rows that outweigh the hand-over to another thread.
constexpr int64_t kGrain = 1 << 13;

struct Plain {
  static constexpr const char* kName = "softmax";
  static constexpr const char* kQualified = "torchkiln::softmax";
  static constexpr bool kLog = false;
};

struct Log {
  static constexpr const char* kName = "log_softmax";
  static constexpr const char* kQualified = "torchkiln::log_softmax";
  static constexpr bool kLog = true;
};

template <class Op>
const auto& op_of() {
  static const auto found = find_op<Schema>(Op::kQualified);
  return found;
}
const auto& backward_op() {
  static const auto found = find_op<BackwardSchema>("torchkiln::softmax_backward");
  return found;
}

/// `dim`, counted from the front.
int64_t check_dim(const char* op, const char* name, const Tensor& tensor, int64_t dim) {
  const int64_t rank = tensor.dim();
  const int64_t range = std::max<int64_t>(rank, 1);  // a 0-dim tensor takes 0 and -1
  TORCH_CHECK_INDEX(-range <= dim && dim < range, "torchkiln.", op, ": dim: got ", dim,
                    ", expected a number from ", -range, " to ", range - 1, ": ", name, " has ",
                    rank, " dimensions");
  return dim < 0 ? dim + range : dim;
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
  check_tensor(op, "mask", *mask);
  check_same_device(op, "mask", *mask, name, tensor);
  TORCH_CHECK(mask->scalar_type() == at::kBool, "torchkiln.", op, ": mask: got dtype ",
              dtype_name(mask->scalar_type()), ", expected bool, true where an element takes part");
  const int64_t missing = rank - mask->dim();
  bool fits = missing >= 0;
  for (int64_t d = 0; fits && d < mask->dim(); ++d) {
    fits = mask->sym_size(d) == 1 || mask->sym_size(d) == tensor.sym_size(missing + d);
  }
  TORCH_CHECK(fits, "torchkiln.", op, ": mask: got shape ", mask->sym_sizes(),
              ", expected one that broadcasts to ", tensor.sym_sizes(), ", the shape of ", name);
}

template <class Op>
int64_t check(const Tensor& x, int64_t dim, const MaybeTensor& mask, bool causal) {
  check_tensor(Op::kName, "x", x);
  check_dtype(Op::kName, "x", x);
  const int64_t at = check_dim(Op::kName, "x", x, dim);
  check_mask(Op::kName, "x", x, at, mask, causal);
  return at;
}

/// An empty result; of Meta and symbolic tensors, too.
Tensor empty_result(const Tensor& tensor) {
  return at::empty_symint(tensor.sym_sizes(),
                          tensor.options().memory_format(at::MemoryFormat::Contiguous));
}

template <class Op>
Tensor output(const Tensor& x, int64_t dim, double, const MaybeTensor& mask, bool causal) {
  check<Op>(x, dim, mask, causal);
  return empty_result(x);
}

/// The mask of a tensor whose dimension `dim` goes to the end.
MaybeTensor turned(const MaybeTensor& mask, const Tensor& tensor, int64_t dim) {
  if (!mask.has_value()) return std::nullopt;
  return mask->expand(tensor.sizes()).movedim(dim, -1);
}

template <class Op>
Tensor real(const Tensor& x, int64_t dim, double scale, const MaybeTensor& mask, bool causal) {
  const int64_t at = check<Op>(x, dim, mask, causal);
  // The kernels mask rows that have no inner dimension.
  if (mask.has_value() && has_inner(x, at)) {
    explain::note("with a mask dimension ", at, " goes last: the kernels mask adjacent elements");
    const Tensor rows =
        real<Op>(x.movedim(at, -1), -1, scale, turned(mask, x, at), /*causal=*/false);
    return rows.movedim(-1, at).contiguous();
  }
  Tensor y = empty_result(x);
  if (x.numel() == 0) return y;

  const SoftmaxView view = view_around(x, at);
  MaybeTensor kept = mask;
  Softmax arguments{};
  arguments.x = view.tensor.const_data_ptr();
  arguments.y = y.data_ptr();
  arguments.dtype = dtype_of(x);
  arguments.log = Op::kLog;
  arguments.scale = scale;
  arguments.outer = view.outer;
  arguments.length = view.length;
  arguments.inner = view.inner;
  arguments.outer_stride = view.outer_stride;
  arguments.stride = view.stride;
  arguments.inner_stride = view.inner_stride;
  arguments.mask = describe_mask(x, at, kept, causal);
  launch(
      Op::kName, x, view.outer * view.inner, std::max<int64_t>(kGrain / view.length, 1),
      [&](auto stream) { return cuda::softmax(arguments, stream); },
      [&](int64_t begin, int64_t end) { return cpu::softmax(arguments, begin, end); });
  return y;
}

int64_t check_backward(const Tensor& grad, const Tensor& y, int64_t dim, const MaybeTensor& mask,
                       bool causal) {
  check_tensor(kBackwardOp, "grad", grad);
  check_tensor(kBackwardOp, "y", y);
  check_same_device(kBackwardOp, "y", y, "grad", grad);
  check_dtype(kBackwardOp, "grad", grad);
  TORCH_CHECK(y.scalar_type() == grad.scalar_type() && y.sym_sizes().equals(grad.sym_sizes()),
              "torchkiln.", kBackwardOp, ": y: got ", dtype_name(y.scalar_type()), " ",
              y.sym_sizes(), ", expected ", dtype_name(grad.scalar_type()), " ", grad.sym_sizes(),
              ", as grad");
  const int64_t at = check_dim(kBackwardOp, "grad", grad, dim);
  check_mask(kBackwardOp, "grad", grad, at, mask, causal);
  return at;
}

Tensor backward_output(const Tensor& grad, const Tensor& y, int64_t dim, bool, double,
                       const MaybeTensor& mask, bool causal) {
  check_backward(grad, y, dim, mask, causal);
  return empty_result(grad);
}

Tensor backward_real(const Tensor& grad, const Tensor& y, int64_t dim, bool log, double scale,
                     const MaybeTensor& mask, bool causal) {
  const int64_t at = check_backward(grad, y, dim, mask, causal);
  if (mask.has_value() && has_inner(grad, at)) {
    const Tensor rows = backward_real(grad.movedim(at, -1), y.movedim(at, -1), -1, log, scale,
                                      turned(mask, grad, at), /*causal=*/false);
    return rows.movedim(-1, at).contiguous();
  }
  Tensor grad_x = empty_result(grad);
  if (grad.numel() == 0) return grad_x;

  const SoftmaxView view = view_around(grad, at);
  const Tensor saved = y.contiguous();
  MaybeTensor kept = mask;
  SoftmaxBackward arguments{};
  arguments.grad = view.tensor.const_data_ptr();
  arguments.y = saved.const_data_ptr();
  arguments.grad_x = grad_x.data_ptr();
  arguments.dtype = dtype_of(grad);
  arguments.log = log;
  arguments.scale = scale;
  arguments.outer = view.outer;
  arguments.length = view.length;
  arguments.inner = view.inner;
  arguments.outer_stride = view.outer_stride;
  arguments.stride = view.stride;
  arguments.inner_stride = view.inner_stride;
  arguments.mask = describe_mask(grad, at, kept, causal);
  launch(
      kBackwardOp, grad, view.outer * view.inner, std::max<int64_t>(kGrain / view.length, 1),
      [&](auto stream) { return cuda::softmax_backward(arguments, stream); },
      [&](int64_t begin, int64_t end) { return cpu::softmax_backward(arguments, begin, end); });
  return grad_x;
}

/// Where an element takes no part; undefined where all do.
Tensor left_out(const Tensor& like, const MaybeTensor& mask, bool causal) {
  Tensor kept;
  if (causal) {
    kept = at::ones_symint({like.sym_size(-2), like.sym_size(-1)}, like.options().dtype(at::kBool))
               .tril();
  }
  if (mask.has_value()) kept = causal ? kept.logical_and(*mask) : *mask;
  return kept.defined() ? kept.logical_not() : kept;
}

/// The op in torch's own ops, in its own precision: for transforms that have no kernel here.
template <class Op>
Tensor decomposed(const Tensor& x, int64_t dim, double scale, const MaybeTensor& mask,
                  bool causal) {
  const int64_t at = check<Op>(x, dim, mask, causal);
  Tensor wide = x.to(compute_dtype(x.scalar_type())) * scale;
  const Tensor out = left_out(x, mask, causal);
  if (out.defined()) wide = wide.masked_fill(out, -std::numeric_limits<double>::infinity());
  return (Op::kLog ? at::log_softmax(wide, at) : at::softmax(wide, at)).to(x.scalar_type());
}

/// The gradient in torch's own ops, which can be differentiated again.
Tensor differentiable_gradient(const Tensor& grad, const Tensor& y, int64_t dim, bool log,
                               double scale, const MaybeTensor& mask, bool causal) {
  const at::ScalarType compute = compute_dtype(grad.scalar_type());
  const Tensor wide = grad.to(compute);
  const Tensor saved = y.to(compute);
  Tensor grad_x = log ? wide - saved.exp() * at::sum(wide, dim, /*keepdim=*/true)
                      : (wide - at::sum(wide * saved, dim, /*keepdim=*/true)) * saved;
  const Tensor out = left_out(grad, mask, causal);
  if (out.defined()) grad_x = grad_x.masked_fill(out, 0);
  return (grad_x * scale).to(grad.scalar_type());
}

template <class Op>
struct Function : torch::autograd::Function<Function<Op>> {
  static Tensor forward(AutogradContext* context, const Tensor& x, int64_t dim, double scale,
                        const MaybeTensor& mask, bool causal) {
    const at::AutoDispatchBelowADInplaceOrView below;
    Tensor y = op_of<Op>().call(x, dim, scale, mask, causal);
    context->saved_data["call"] =
        c10::ivalue::Tuple::create(check_dim(Op::kName, "x", x, dim), scale, causal);
    context->save_for_backward({y, mask.value_or(Tensor())});
    return y;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const variable_list saved = context->get_saved_variables();
    const MaybeTensor mask = saved[1].defined() ? MaybeTensor(saved[1]) : std::nullopt;
    const auto& call = context->saved_data["call"].toTupleRef().elements();
    const int64_t dim = call[0].toInt();
    const double scale = call[1].toDouble();
    const bool causal = call[2].toBool();
    if (at::GradMode::is_enabled()) {
      return {differentiable_gradient(grads[0], saved[0], dim, Op::kLog, scale, mask, causal),
              Tensor(), Tensor(), Tensor(), Tensor()};
    }
    const at::AutoDispatchBelowADInplaceOrView below;
    return {backward_op().call(grads[0], saved[0], dim, Op::kLog, scale, mask, causal), Tensor(),
            Tensor(), Tensor(), Tensor()};
  }
};

template <class Op>
Tensor autograd(c10::DispatchKeySet keys, const Tensor& x, int64_t dim, double scale,
                const MaybeTensor& mask, bool causal) {
  if (is_transformed(x)) return decomposed<Op>(x, dim, scale, mask, causal);
  if (needs_gradient(x)) return Function<Op>::apply(x, dim, scale, mask, causal);
  const at::AutoDispatchBelowADInplaceOrView below;
  return op_of<Op>().redispatch(keys & c10::after_autograd_keyset, x, dim, scale, mask, causal);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) {
  for (const char* name : {Plain::kName, Log::kName}) {
    const std::string schema = std::string(name) +
                               "(Tensor x, int dim, *, float scale=1.0, Tensor? mask=None, "
                               "bool causal=False) -> Tensor";
    m.def(schema.c_str(), {at::Tag::pt2_compliant_tag});
  }
  m.def(
      "softmax_backward(Tensor grad, Tensor y, int dim, bool log, float scale, Tensor? mask, "
      "bool causal) -> Tensor",
      {at::Tag::pt2_compliant_tag});
}

// All backends, so that what has no kernel (sparse, other devices) meets our checks and not a
// missing entry.
TORCH_LIBRARY_IMPL(torchkiln, CompositeExplicitAutograd, m) {
  m.impl("softmax", TORCH_FN(real<Plain>));
  m.impl("log_softmax", TORCH_FN(real<Log>));
  m.impl(kBackwardOp, TORCH_FN(backward_real));
}
TORCH_LIBRARY_IMPL(torchkiln, Meta, m) {
  m.impl("softmax", TORCH_FN(output<Plain>));
  m.impl("log_softmax", TORCH_FN(output<Log>));
  m.impl(kBackwardOp, TORCH_FN(backward_output));
}
TORCH_LIBRARY_IMPL(torchkiln, Autograd, m) {
  m.impl("softmax", TORCH_FN(autograd<Plain>));
  m.impl("log_softmax", TORCH_FN(autograd<Log>));
}
TORCH_LIBRARY_IMPL(torchkiln, FuncTorchBatched, m) {
  m.impl("softmax", TORCH_FN(decomposed<Plain>));
  m.impl("log_softmax", TORCH_FN(decomposed<Log>));
}

}  // namespace torchkiln::softmax_ops

namespace torchkiln {

at::Tensor softmax(const at::Tensor& x, int64_t dim, double scale,
                   const std::optional<at::Tensor>& mask, bool causal) {
  return softmax_ops::op_of<softmax_ops::Plain>().call(x, dim, scale, mask, causal);
}

at::Tensor log_softmax(const at::Tensor& x, int64_t dim, double scale,
                       const std::optional<at::Tensor>& mask, bool causal) {
  return softmax_ops::op_of<softmax_ops::Log>().call(x, dim, scale, mask, causal);
}

}  // namespace torchkiln
