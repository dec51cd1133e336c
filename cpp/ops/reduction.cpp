#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <limits>

#include "reduction_steps.h"
#include "torchkiln/autograd.h"
#include "torchkiln/checks.h"
#include "torchkiln/launch.h"
#include "torchkiln/ops.h"
#include "torchkiln/workspace.h"

namespace torchkiln::reduction_ops {
namespace {

using at::OptionalIntArrayRef;
using at::Tensor;
using OptionalDtype = std::optional<at::ScalarType>;

struct Sum {
  static constexpr const char* kName = "sum";
  static constexpr const char* kQualified = "torchkiln::sum";
  static constexpr bool kDivides = false;
  static constexpr double kOfNothing = 0;
  static constexpr auto torchs =
      static_cast<Tensor (*)(const Tensor&, OptionalIntArrayRef, bool, OptionalDtype)>(at::sum);
};

struct Mean {
  static constexpr const char* kName = "mean";
  static constexpr const char* kQualified = "torchkiln::mean";
  static constexpr bool kDivides = true;
  static constexpr double kOfNothing = std::numeric_limits<double>::quiet_NaN();
  static constexpr auto torchs =
      static_cast<Tensor (*)(const Tensor&, OptionalIntArrayRef, bool, OptionalDtype)>(at::mean);
};

template <class Op>
const auto& op_of() {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow(Op::kQualified, "")
          .template typed<Tensor(const Tensor&, OptionalIntArrayRef, bool, OptionalDtype)>();
  return op;
}

/// For each dimension of x whether it is reduced: those named, or all when none is.
template <class Op>
Mask reduced_dims(const Tensor& x, OptionalIntArrayRef dim) {
  const int64_t rank = x.dim();
  const bool all = !dim.has_value() || dim->empty();
  Mask mask(rank, all);
  if (all) return mask;
  const int64_t range = std::max<int64_t>(rank, 1);  // a 0-dim tensor takes 0 and -1
  Mask named(range, false);
  for (const int64_t d : *dim) {
    TORCH_CHECK_INDEX(-range <= d && d < range, "torchkiln.", Op::kName, ": dim: got ", d,
                      ", expected a number from ", -range, " to ", range - 1, ": x has ", rank,
                      " dimensions");
    const int64_t at = d < 0 ? d + range : d;
    TORCH_CHECK(!named[at], "torchkiln.", Op::kName, ": dim: got dimension ", at, " twice in ",
                *dim, ", expected each once");
    named[at] = true;
  }
  if (rank > 0) mask = named;
  return mask;
}

template <class Op>
Mask check(const Tensor& x, OptionalIntArrayRef dim, OptionalDtype dtype) {
  check_tensor(Op::kName, "x", x);
  check_dtype(Op::kName, "x", x);
  TORCH_CHECK(!dtype.has_value() || is_supported_dtype(*dtype), "torchkiln.", Op::kName,
              ": dtype: got ", dtype_name(dtype.value_or(at::kFloat)), ", expected ",
              kSupportedDtypes);
  return reduced_dims<Op>(x, dim);
}

/// The empty output; on Meta and symbolic tensors, too.
Tensor empty_output(const Tensor& x, const Mask& mask, bool keepdim, OptionalDtype dtype) {
  c10::SymDimVector shape;
  for (int64_t d = 0; d < x.dim(); ++d) {
    if (!mask[d]) shape.push_back(x.sym_size(d));
    if (mask[d] && keepdim) shape.push_back(1);
  }
  const at::TensorOptions options = x.options().memory_format(at::MemoryFormat::Contiguous);
  return at::empty_symint(shape, options.dtype(dtype.value_or(x.scalar_type())));
}

template <class Op>
Tensor checked_output(const Tensor& x, OptionalIntArrayRef dim, bool keepdim, OptionalDtype dtype) {
  return empty_output(x, check<Op>(x, dim, dtype), keepdim, dtype);
}

void run(const char* op, Reduction arguments, const Tensor& where) {
  Workspace workspace;
  const auto allocate = [&](size_t bytes) {
    workspace = Workspace(where.device(), bytes);
    arguments.workspace = workspace.data();
  };
  if (where.is_cpu()) allocate(cpu::workspace_bytes(arguments));
  launch(
      op, where, cpu::task_count(arguments), 1,
      [&](auto stream) {
        allocate(cuda::workspace_bytes(arguments));
        return cuda::reduce(arguments, stream);
      },
      [&](int64_t begin, int64_t end) { return cpu::reduce(arguments, begin, end); });
  if (where.is_cpu() && workspace.bytes() > 0) {
    constexpr int64_t kGrain = 1 << 12;
    at::parallel_for(0, arguments.outer * arguments.inner, kGrain, [&](int64_t begin, int64_t end) {
      check_status(op, cpu::reduce_finish(arguments, begin, end));
    });
  }
}

template <class Op>
Tensor real(const Tensor& x, OptionalIntArrayRef dim, bool keepdim, OptionalDtype dtype) {
  const Mask mask = check<Op>(x, dim, dtype);
  Tensor out = empty_output(x, mask, keepdim, dtype);
  if (out.numel() == 0) return out;
  if (x.numel() == 0) return out.fill_(Op::kOfNothing);
  if (x.numel() == out.numel()) {
    out.view(x.sizes()).copy_(x);
    return out;
  }
  const double divisor = Op::kDivides ? static_cast<double>(x.numel() / out.numel()) : 1;
  reduce_in_steps(x, mask, out, [&](Reduction step, bool is_last) {
    step.divisor = is_last ? divisor : 1;
    run(Op::kName, step, x);
  });
  return out;
}

template <class Op>
struct Function : torch::autograd::Function<Function<Op>> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x,
                        OptionalIntArrayRef dim, bool keepdim, OptionalDtype dtype) {
    const at::AutoDispatchBelowADInplaceOrView below;
    Tensor out = op_of<Op>().call(x, dim, keepdim, dtype);
    std::vector<int64_t> inserted;
    const Mask mask = reduced_dims<Op>(x, dim);
    for (int64_t d = 0; d < x.dim() && !keepdim; ++d) {
      if (mask[d]) inserted.push_back(d);
    }
    c10::SymInt count = 1;
    for (int64_t d = 0; d < x.dim(); ++d) {
      if (mask[d]) count = count * x.sym_size(d);
    }
    context->saved_data["sizes"] = x.sym_sizes();
    context->saved_data["dtype"] = static_cast<int64_t>(x.scalar_type());
    context->saved_data["inserted"] = inserted;
    context->saved_data["count"] = count;
    return out;
  }

  /// The incoming gradient, divided and converted while it is small, and then seen from every
  /// element: no kernel writes it out.
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    const auto& saved = context->saved_data;
    Tensor grad = grads[0];
    if (Op::kDivides) grad = grad / at::Scalar(saved.at("count").toSymInt());
    grad = grad.to(static_cast<at::ScalarType>(saved.at("dtype").toInt()));
    for (const int64_t d : saved.at("inserted").toIntVector()) grad = grad.unsqueeze(d);
    return {grad.expand_symint(saved.at("sizes").toSymIntVector()), Tensor(), Tensor(), Tensor()};
  }
};

/// For transforms that have no kernel here.
template <class Op>
Tensor decomposed(const Tensor& x, OptionalIntArrayRef dim, bool keepdim, OptionalDtype dtype) {
  check<Op>(x, dim, dtype);
  return Op::torchs(x, dim, keepdim, dtype);
}

template <class Op>
Tensor autograd(c10::DispatchKeySet keys, const Tensor& x, OptionalIntArrayRef dim, bool keepdim,
                OptionalDtype dtype) {
  if (is_transformed(x)) return decomposed<Op>(x, dim, keepdim, dtype);
  if (needs_gradient(x)) return Function<Op>::apply(x, dim, keepdim, dtype);
  const at::AutoDispatchBelowADInplaceOrView below;
  return op_of<Op>().redispatch(keys & c10::after_autograd_keyset, x, dim, keepdim, dtype);
}

/// A sum of half precision stays in float32, as torch's does: only where autocast is on for CUDA,
/// and only when no dtype is asked for.
Tensor sum_autocast(const Tensor& x, OptionalIntArrayRef dim, bool keepdim, OptionalDtype dtype) {
  check_tensor(Sum::kName, "x", x);
  const c10::impl::ExcludeDispatchKeyGuard outside(c10::autocast_dispatch_keyset);
  if (x.is_cuda() && is_half(x.scalar_type()) && !dtype.has_value()) dtype = at::kFloat;
  return torchkiln::sum(x, dim, keepdim, dtype);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) {
  m.def("sum(Tensor x, int[1]? dim=None, bool keepdim=False, *, ScalarType? dtype=None) -> Tensor",
        {at::Tag::pt2_compliant_tag});
  m.def("mean(Tensor x, int[1]? dim=None, bool keepdim=False, *, ScalarType? dtype=None) -> Tensor",
        {at::Tag::pt2_compliant_tag});
}

// All backends, so that what has no kernel (sparse, other devices) meets our checks and not a
// missing entry.
TORCH_LIBRARY_IMPL(torchkiln, CompositeExplicitAutograd, m) {
  m.impl("sum", TORCH_FN(real<Sum>));
  m.impl("mean", TORCH_FN(real<Mean>));
}
TORCH_LIBRARY_IMPL(torchkiln, Meta, m) {
  m.impl("sum", TORCH_FN(checked_output<Sum>));
  m.impl("mean", TORCH_FN(checked_output<Mean>));
}
TORCH_LIBRARY_IMPL(torchkiln, Autograd, m) {
  m.impl("sum", TORCH_FN(autograd<Sum>));
  m.impl("mean", TORCH_FN(autograd<Mean>));
}
TORCH_LIBRARY_IMPL(torchkiln, FuncTorchBatched, m) {
  m.impl("sum", TORCH_FN(decomposed<Sum>));
  m.impl("mean", TORCH_FN(decomposed<Mean>));
}
TORCH_LIBRARY_IMPL(torchkiln, AutocastCUDA, m) { m.impl("sum", TORCH_FN(sum_autocast)); }

}  // namespace torchkiln::reduction_ops

namespace torchkiln {

at::Tensor sum(const at::Tensor& x, at::OptionalIntArrayRef dim, bool keepdim,
               std::optional<at::ScalarType> dtype) {
  return reduction_ops::op_of<reduction_ops::Sum>().call(x, dim, keepdim, dtype);
}

at::Tensor mean(const at::Tensor& x, at::OptionalIntArrayRef dim, bool keepdim,
                std::optional<at::ScalarType> dtype) {
  return reduction_ops::op_of<reduction_ops::Mean>().call(x, dim, keepdim, dtype);
}

}  // namespace torchkiln
