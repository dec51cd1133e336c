#pragma once

// Fills the argument structs of the cross-entropy kernels from tensors and launches them.

#include <ATen/ATen.h>
#include <ATen/functorch/BatchedTensorImpl.h>

#include <algorithm>
#include <atomic>

#include "cross_entropy/options.h"
#include "detail/rows_view.h"
#include "torchkiln/kernels/cross_entropy.h"
#include "torchkiln/torch/elementwise.h"
#include "torchkiln/torch/launch.h"

namespace torchkiln {

/// Logits [..., classes] as [rows, classes] with class stride 1: a view if the strides allow one,
/// else a copy.
inline MaybeCopy rows_of(const at::Tensor& last) {
  if (auto view = rows_without_copy(last)) return std::move(*view);
  trace::note("copied: strides ", last.strides(), " are no evenly spaced rows of adjacent classes");
  return MaybeCopy::owned(contiguous_copy(last).view({-1, last.size(-1)}));
}

/// rows_of() for logits with the classes in class_dim().
inline MaybeCopy class_rows(const at::Tensor& tensor) {
  return tensor.dim() > 2 ? rows_of(classes_last(tensor)) : rows_of(tensor);
}

inline int64_t row_count(const at::Tensor& logits) {
  return logits.numel() / logits.size(class_dim(logits));
}

inline c10::SymInt sym_row_count(const at::Tensor& logits) {
  return logits.sym_numel() / logits.sym_size(class_dim(logits));
}

/// The size of the state that backward needs, one tensor of the compute dtype: log-sum-exp, then
/// mass, then target weight of all rows and, for a mean, its divisor. With `accuracy`, a number per
/// row follows: 1 if the target class has the largest logit, else 0.
inline c10::SymInt state_size(const c10::SymInt& rows, LossReduction reduction, bool accuracy) {
  const c10::SymInt mean = reduction == LossReduction::mean ? 1 : 0;
  return rows * (accuracy ? 4 : 3) + mean;
}

struct RowState {
  void* log_sum_exp;
  void* mass;
  void* target_weight;
  void* divisor;            // null unless mean
  void* correct;            // null without accuracy
  void* sum = nullptr;      // only for a shard
  void* entropy = nullptr;  // only for a log-probability
};

/// The state of `rows` rows, as seen by a kernel that begins with row `begin`.
inline RowState row_state(const at::Tensor& state, int64_t rows, LossReduction reduction,
                          int64_t begin = 0) {
  const auto size = static_cast<int64_t>(state.element_size());
  char* first = static_cast<char*>(state.data_ptr());
  const bool mean = reduction == LossReduction::mean;
  char* divisor = first + 3 * rows * size;
  char* correct = mean ? divisor + size : divisor;
  const auto at_begin = [&](char* part) { return part + begin * size; };
  return {at_begin(first), at_begin(first + rows * size), at_begin(first + 2 * rows * size),
          mean ? divisor : nullptr, at_begin(correct)};
}

/// The tensor inside the batch wrappers of torch.func.vmap.
inline at::Tensor unbatched(at::Tensor tensor) {
  while (auto* batched = at::functorch::maybeGetBatchedImpl(tensor)) tensor = batched->value();
  return tensor;
}

/// Raises an error that names the first target that is not a class. Synchronises with the GPU.
inline void check_classes(const char* op, const at::Tensor& target, int64_t classes,
                          int64_t ignore_index) {
  const at::Tensor all = unbatched(target);
  const at::Tensor bad = all.ne(ignore_index).logical_and(all.lt(0).logical_or(all.ge(classes)));
  if (!bad.any().item<bool>()) return;
  TORCH_CHECK_INDEX(false, "torchkiln.", op, ": target: got ",
                    all.masked_select(bad)[0].item<int64_t>(), ", expected one of ", classes,
                    " classes, 0 to ", classes - 1, ", or ignore_index, ", ignore_index);
}

/// The target arguments of the kernels, and the tensors that own their memory.
struct TargetView {
  ClassTarget arguments{};
  MaybeCopy target;
  at::Tensor weight;
};

inline TargetView view_target(const at::Tensor& target, const LossOptions& options,
                              at::ScalarType compute) {
  TargetView view;
  view.arguments.ignore_index = options.ignore_index;
  view.arguments.label_smoothing = options.label_smoothing;
  view.arguments.first_class = options.first_class;
  view.arguments.all_classes = options.all_classes;
  if (target.scalar_type() == at::kLong) {
    view.target = target.expect_contiguous();
    view.arguments.index = view.target->const_data_ptr<int64_t>();
  } else {
    view.target = class_rows(target);
    view.arguments.probabilities = view.target->const_data_ptr();
    view.arguments.probabilities_dtype = dtype_of(*view.target);
    view.arguments.probabilities_row_stride = view.target->stride(0);
  }
  if (options.weight.has_value()) {
    view.weight = options.weight->to(compute).contiguous();
    view.arguments.weight = view.weight.const_data_ptr();
  }
  return view;
}

/// Fewest rows per CPU thread. With fewer, starting a thread takes longer than its work.
inline int64_t row_grain(int64_t classes) { return std::max<int64_t>((1 << 13) / classes, 1); }

/// The arguments of a kernel that writes to `out` the sum of the losses, or their mean and its
/// divisor.
inline LossSum sum_arguments(const at::Tensor& logits, const LossOptions& options,
                             const at::Tensor& losses, const RowState& kept,
                             const at::Tensor& out) {
  LossSum arguments{};
  arguments.loss = losses.const_data_ptr();
  arguments.target_weight = kept.target_weight;
  arguments.dtype = dtype_of(logits);
  arguments.rows = losses.numel();
  arguments.mean = options.reduction == LossReduction::mean;
  arguments.out = out.data_ptr();
  arguments.out_dtype = dtype_of(out);
  arguments.divisor = kept.divisor;
  return arguments;
}

/// Computes the sum of the losses, or their mean and its divisor.
inline void run_sum(const char* op, const at::Tensor& where, const LossSum& arguments) {
  launch(
      op, where, 1, 1, [&](auto stream) { return cuda::loss_sum(arguments, stream); },
      [&](int64_t, int64_t) { return cpu::loss_sum(arguments); });
}

/// Sets what both passes read, except the logits: the targets, and the state of the rows.
template <class Problem>
void set_options(Problem& problem, const TargetView& view, const LossOptions& options,
                 const RowState& kept) {
  problem.target = view.arguments;
  problem.z_loss = options.z_loss;
  problem.log_sum_exp = kept.log_sum_exp;
  problem.mass = kept.mass;
  problem.target_weight = kept.target_weight;
  problem.is_logprob = options.is_logprob;
}

/// Sets the logits, as rows of adjacent classes.
template <class Problem>
void set_rows(Problem& problem, const at::Tensor& rows) {
  problem.logits = rows.const_data_ptr();
  problem.dtype = dtype_of(rows);
  problem.rows = rows.size(0);
  problem.classes = rows.size(1);
  problem.row_stride = rows.stride(0);
}

/// The dimensions of adjacent rows, for logits whose classes are not adjacent.
inline std::optional<CollapsedDims> adjacent_rows(const at::Tensor& logits) {
  return logits.dim() == 2 ? collapse_dims(logits, 0, 1) : collapse_dims(logits, 2, logits.dim());
}

/// Whether a CPU kernel reads the logits as they are, although their classes are not adjacent: it
/// computes adjacent rows side by side. Fewer rows than classes are copied, because each row then
/// is the work of one thread.
inline bool has_adjacent_rows(const at::Tensor& logits, const at::Tensor& target,
                              const LossOptions& options) {
  constexpr int64_t kLeast = 64;  // adjacent rows
  if (!logits.is_cpu() || logits.dim() < 2 || logits.size(1) == 1 || logits.stride(1) == 1 ||
      target.scalar_type() != at::kLong || options.label_smoothing != 0 || options.is_logprob ||
      row_count(logits) < logits.size(1))
    return false;
  const auto rows = adjacent_rows(logits);
  return rows && rows->stride == 1 && rows->size >= kLeast;
}

/// set_rows() for logits with has_adjacent_rows(). Returns their layout.
template <class Problem>
cpu::ClassLayout set_adjacent_rows(Problem& problem, const at::Tensor& logits) {
  problem.logits = logits.const_data_ptr();
  problem.dtype = dtype_of(logits);
  problem.rows = row_count(logits);
  problem.classes = logits.size(1);
  problem.row_stride = 1;
  return {logits.stride(1), adjacent_rows(logits)->size, logits.stride(0)};
}

/// Computes the loss and the state of each row, and `total` if it is not null.
inline void run_forward(const char* op, const at::Tensor& logits, const at::Tensor& target,
                        const LossOptions& options, const at::Tensor& losses, const RowState& kept,
                        const LossSum* total = nullptr) {
  const TargetView view = view_target(target, options, losses.scalar_type());
  CrossEntropy arguments{};
  set_options(arguments, view, options, kept);
  arguments.loss = losses.data_ptr();
  if (options.accuracy) arguments.correct = kept.correct;
  arguments.sum = kept.sum;
  arguments.scale = options.scale;
  arguments.entropy = kept.entropy;
  MaybeCopy rows;
  cpu::ClassLayout layout;
  if (kept.sum == nullptr && has_adjacent_rows(logits, target, options)) {
    layout = set_adjacent_rows(arguments, logits);
  } else {
    rows = class_rows(logits);
    set_rows(arguments, *rows);
  }
  std::atomic<const char*> error{nullptr};  // of CPU threads; does not name the bad value
  launch(
      op, logits, arguments.rows, row_grain(arguments.classes),
      [&](auto stream) { return cuda::cross_entropy(arguments, total, stream); },
      [&](int64_t begin, int64_t end) {
        const Status status = cpu::cross_entropy(arguments, layout, begin, end);
        if (!status.ok()) error = status.error;
        return Status{};
      });
  if (error == nullptr) {
    if (total != nullptr && logits.is_cpu()) run_sum(op, logits, *total);
    return;
  }
  if (view.arguments.index != nullptr) {
    check_classes(op, *view.target, with_all_classes(arguments).target.all_classes,
                  options.ignore_index);
  }
  check_status(op, Status{error});
}

/// Computes the gradient of the logits into the rows of `out`. The logits are rows of adjacent
/// classes, which may be `out` itself, or has_adjacent_rows() is true for them. For a
/// log-probability of float32 rows `out` may have half precision. An undefined `grad_entropy`
/// counts as 0.
inline void run_backward(const char* op, const at::Tensor& grad, const at::Tensor& logits,
                         const at::Tensor& target, const LossOptions& options, const RowState& kept,
                         const at::Tensor& out, const at::Tensor& grad_entropy = {}) {
  const TargetView view = view_target(target, options, compute_dtype(logits.scalar_type()));
  const bool each = options.reduction == LossReduction::none;
  const at::Tensor grads = each ? grad.reshape({out.size(0)}) : grad;
  CrossEntropyBackward arguments{};
  arguments.grad = grads.const_data_ptr();
  arguments.grad_dtype = dtype_of(grads);
  arguments.grad_stride = each ? grads.stride(0) : 0;
  arguments.divisor = kept.divisor;
  set_options(arguments, view, options, kept);
  cpu::ClassLayout layout;
  if (has_adjacent_rows(logits, target, options)) {
    layout = set_adjacent_rows(arguments, logits);
  } else {
    set_rows(arguments, logits);
  }
  arguments.grad_logits = out.data_ptr();
  arguments.grad_logits_dtype = dtype_of(out);
  arguments.grad_logits_row_stride = out.stride(0);
  arguments.factor = options.scale;
  if (grad_entropy.defined()) {
    arguments.entropy = kept.entropy;
    arguments.grad_entropy = grad_entropy.const_data_ptr();
  }
  launch(
      op, out, arguments.rows, row_grain(arguments.classes),
      [&](auto stream) { return cuda::cross_entropy_backward(arguments, stream); },
      [&](int64_t begin, int64_t end) {
        return cpu::cross_entropy_backward(arguments, layout, begin, end);
      });
}

}  // namespace torchkiln
