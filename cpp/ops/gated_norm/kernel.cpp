// The kernels of gated_rms_norm: checks, outputs and launches. Rows that are too long
// for one kernel go to composed.cpp; gated_norm.cpp has the op and its derivatives.

#include "detail/normalized_shape.h"
#include "detail/rows_view.h"
#include "gated_norm/gated_norm.h"
#include "torchkiln/kernels/gated_norm.h"
#include "torchkiln/torch/checks.h"
#include "torchkiln/torch/elementwise.h"
#include "torchkiln/torch/empty.h"
#include "torchkiln/torch/launch.h"

namespace torchkiln::gated_norm_ops {
namespace {

constexpr const char* kName = "gated_rms_norm";
constexpr const char* kBackward = "gated_rms_norm_backward";

void check(const Call& call) {
  check_tensor(kName, "x", call.x);
  check_dtype(kName, "x", call.x);
  check_like(kName, "gate", call.gate, "x", call.x);
  check_normalized_shape(kName, call.x, call.shape);
  check_normalized_parameter(kName, "weight", call.weight, call.shape, "x", call.x);
  check_eps(kName, call.eps);
  if (call.groups == 1) return;
  TORCH_CHECK_VALUE(call.shape.size() == 1, "torchkiln.", kName, ": groups: got ", call.groups,
                    ", expected 1 for a normalized_shape of ", call.shape.size(), " dimensions");
  TORCH_CHECK_VALUE(call.groups > 0 && call.shape[0] % call.groups == 0, "torchkiln.", kName,
                    ": groups: got ", call.groups, ", expected a divisor of ", call.shape[0],
                    ", the last size of x");
}

void check_backward(const Backward::Arguments& call) {
  const Tensor &grad = call.grad, &rstd = call.rstd;
  check_tensor(kBackward, "grad", grad);
  check_dtype(kBackward, "grad", grad);
  check_like(kBackward, "x", call.x, "grad", grad);
  check_like(kBackward, "gate", call.gate, "grad", grad);
  check_same_device(kBackward, "rstd", rstd, "grad", grad);
  const int64_t leading = rstd.dim() - 1;
  const at::ScalarType compute = compute_dtype(grad.scalar_type());
  TORCH_CHECK(leading >= 0 && leading < grad.dim() && rstd.scalar_type() == compute &&
                  rstd.sym_size(-1) >= 1 &&
                  (rstd.sym_size(-1) == 1 ||
                   (leading == grad.dim() - 1 && grad.sym_size(-1) % rstd.sym_size(-1) == 0)) &&
                  rstd.sym_sizes().slice(0, leading).equals(grad.sym_sizes().slice(0, leading)),
              "torchkiln.", kBackward, ": rstd: got ", dtype_name(rstd.scalar_type()), " ",
              rstd.sym_sizes(), ", expected ", dtype_name(compute),
              " [leading sizes of grad, groups], the rstd of the forward");
  check_normalized_parameter(kBackward, "weight", call.weight, grad.sym_sizes().slice(leading),
                             "grad", grad);
}

/// The sizes of x as [tokens, groups, columns].
struct Sizes {
  int64_t tokens, groups, columns;

  /// `leading`: the number of dimensions that are not normalized.
  Sizes(const Tensor& x, int64_t leading, int64_t groups_)
      : tokens(c10::multiply_integers(x.sizes().slice(0, leading))),
        groups(groups_),
        columns(c10::multiply_integers(x.sizes().slice(leading)) / groups_) {}
  int64_t elements() const { return groups * columns; }
};

template <class Problem>
void set_sizes(Problem& problem, const Sizes& sizes) {
  problem.tokens = sizes.tokens;
  problem.groups = sizes.groups;
  problem.columns = sizes.columns;
}

void note_composed(const Sizes& sizes) {
  trace::note("composed of swiglu and rms_norm: a row of ", sizes.columns,
              " elements is too long for one kernel");
}

}  // namespace

Two outputs(const Call& call, bool wants_rstd) {
  check(call);
  Tensor rstd;
  if (wants_rstd) {
    const auto leading = call.x->dim() - static_cast<int64_t>(call.shape.size());
    c10::SymDimVector sizes(call.x->sym_sizes().slice(0, leading));
    sizes.push_back(call.groups);
    rstd = empty_of(sizes, call.x->options().dtype(compute_dtype(call.x->scalar_type())));
  }
  return {empty_contiguous(call.x), rstd};
}

Two run(const Call& call, bool wants_rstd) {
  auto [y, rstd] = outputs(call, wants_rstd);
  if (y.numel() == 0) return {y, rstd};
  const Sizes sizes(y, y.dim() - static_cast<int64_t>(call.shape.size()), call.groups);
  const RowsView x = view_as_rows(call.x, sizes.tokens, sizes.elements());
  const RowsView gate = view_as_rows(call.gate, sizes.tokens, sizes.elements());
  const Tensor weight = contiguous(call.weight);
  GatedNorm arguments{};
  set_sizes(arguments, sizes);
  arguments.x = x.tensor->const_data_ptr();
  arguments.gate = gate.tensor->const_data_ptr();
  arguments.weight = data(weight);
  arguments.y = y.data_ptr();
  arguments.rstd = rstd.defined() ? rstd.data_ptr() : nullptr;
  arguments.dtype = dtype_of(y);
  arguments.weight_dtype = weight.defined() ? dtype_of(weight) : arguments.dtype;
  arguments.gate_first = call.gate_first;
  arguments.eps = call.eps;
  arguments.weight_offset = call.offset;
  arguments.x_stride = x.stride;
  arguments.gate_stride = gate.stride;
  bool held = true;
  launch(
      kName, y, sizes.tokens, std::max<int64_t>(1, kElementwiseGrain / sizes.elements()),
      [&](auto stream) {
        held = cuda::holds_rows(arguments);
        return held ? cuda::gated_norm(arguments, stream) : Status{};
      },
      [&](int64_t begin, int64_t end) { return cpu::gated_norm(arguments, begin, end); });
  if (held) return {y, rstd};
  note_composed(sizes);
  return composed_forward(call);
}

Three Backward::meta(const Arguments& call) {
  check_backward(call);
  const auto like = [&](bool wanted, const Tensor& tensor) {
    return wanted ? empty_contiguous(tensor) : no_output(call.grad);
  };
  return {like(call.wanted[0], call.grad), like(call.wanted[1], call.grad),
          like(call.wanted[2] && call.weight, call.weight ? *call.weight : *call.grad)};
}

Three Backward::kernel(const Arguments& call) {
  auto [grad_x, grad_gate, grad_weight] = meta(call);
  const Tensor& grad = call.grad;
  const MaybeCopy kept = as_contiguous(call.rstd);  // as in the backward of norms
  const Tensor& rstd = *kept;
  if (grad.numel() == 0) return {grad_x, grad_gate, grad_weight.zero_()};
  const bool wants_weight = call.wanted[2] && call.weight;
  const Sizes sizes(grad, rstd.dim() - 1, rstd.size(-1));
  const RowsView grad_rows = view_as_rows(grad, sizes.tokens, sizes.elements());
  const RowsView x_rows = view_as_rows(call.x, sizes.tokens, sizes.elements());
  const RowsView gate_rows = view_as_rows(call.gate, sizes.tokens, sizes.elements());
  const Tensor weights = contiguous(call.weight);
  GatedNormBackward arguments{};
  set_sizes(arguments, sizes);
  arguments.grad = grad_rows.tensor->const_data_ptr();
  arguments.x = x_rows.tensor->const_data_ptr();
  arguments.gate = gate_rows.tensor->const_data_ptr();
  arguments.weight = data(weights);
  arguments.rstd = rstd.const_data_ptr();
  arguments.grad_x = call.wanted[0] ? grad_x.data_ptr() : nullptr;
  arguments.grad_gate = call.wanted[1] ? grad_gate.data_ptr() : nullptr;
  arguments.grad_weight = wants_weight ? grad_weight.data_ptr() : nullptr;
  arguments.dtype = dtype_of(grad);
  arguments.weight_dtype = weights.defined() ? dtype_of(weights) : arguments.dtype;
  arguments.gate_first = call.gate_first;
  arguments.weight_offset = call.offset;
  arguments.grad_stride = grad_rows.stride;
  arguments.x_stride = x_rows.stride;
  arguments.gate_stride = gate_rows.stride;
  bool held = true;
  launch_split(
      kBackward, grad, arguments, kElementwiseGrain / 64, cpu::split,
      [&](Allocate allocate, auto stream) {
        held = cuda::holds_rows(arguments);
        return held ? cuda::gated_norm_backward(arguments, allocate, stream) : Status{};
      },
      cpu::gated_norm_backward, cpu::gated_norm_backward_finish);
  if (held) return {grad_x, grad_gate, grad_weight};
  note_composed(sizes);
  auto [of_x, of_gate, of_weight] = composed_backward(call);
  return {call.wanted[0] ? of_x : grad_x, call.wanted[1] ? of_gate : grad_gate,
          wants_weight ? of_weight : grad_weight};
}

}  // namespace torchkiln::gated_norm_ops
