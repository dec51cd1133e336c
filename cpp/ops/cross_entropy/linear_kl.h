#pragma once

// The arguments of linear_kl(), their checks, and the divergence of a chunk of rows.

#include <limits>

#include "cross_entropy/class_chunks.h"
#include "cross_entropy/logprob.h"
#include "detail/check_linear.h"

namespace torchkiln {

template <>
struct InSchema<DivergenceKind> {
  using Type = c10::string_view;
  static DivergenceKind read(const char* op, c10::string_view name) {
    if (name == "forward") return DivergenceKind::forward;
    if (name == "reverse") return DivergenceKind::reverse;
    TORCH_CHECK_VALUE(name == "js", "torchkiln.", op, ": direction: got '", name,
                      "', expected one of forward, reverse, js");
    return DivergenceKind::js;
  }
  static c10::string_view write(DivergenceKind kind) {
    return kind == DivergenceKind::forward   ? "forward"
           : kind == DivergenceKind::reverse ? "reverse"
                                             : "js";
  }
};

}  // namespace torchkiln

namespace torchkiln::linear_kl_ops {

using at::Tensor;

inline constexpr const char* kName = "linear_kl";
inline constexpr LinearNames kTeacher{"weight_y", "bias_y", "the first size of weight_y", "y"};

/// The arguments of a call.
struct Call {
  LogitLayer student, teacher;  // x of any shape
  double temperature = 1;
  DivergenceKind direction = DivergenceKind::forward;
  double beta = 0.5;
  MaybeTensor rows;

  TORCHKILN_FIELDS(self.student.x, self.student.weight, self.teacher.x, self.teacher.weight,
                   self.student.bias, self.teacher.bias, self.temperature, self.direction,
                   self.beta, self.rows);

  c10::SymIntArrayRef shape() const { return student.x.sym_sizes().slice(0, student.x.dim() - 1); }
  /// The call with student and teacher exchanged, which has the same divergence.
  Call exchanged() const {
    Call other = *this;
    std::swap(other.student, other.teacher);
    other.beta = 1 - beta;
    if (direction == DivergenceKind::forward) other.direction = DivergenceKind::reverse;
    if (direction == DivergenceKind::reverse) other.direction = DivergenceKind::forward;
    return other;
  }
};

/// Checks the layouts, and that all tensors are on one device.
inline void check_places(const char* op, const Call& call) {
  const LogitLayer &own = call.student, &other = call.teacher;
  check_tensors(op, {{"x", own.x}, {"weight", own.weight}, {"y", other.x}});
  check_tensors(op, {{"x", own.x}, {"weight_y", other.weight}});
  if (other.bias) check_tensors(op, {{"x", own.x}, {"bias_y", *other.bias}});
}

/// Whether beta and 1 - beta are between 0 and 1 in the compute dtype.
inline bool is_share(double beta, at::ScalarType dtype) {
  const auto holds = [](auto own) { return own > 0 && own < 1 && 1 - own < 1; };
  return dtype == at::kDouble ? holds(beta) : holds(static_cast<float>(beta));
}

inline void check(const char* op, const Call& call) {
  check_places(op, call);
  const auto& [x, weight, bias, softcap, one, dtype] = call.student;
  const Tensor &y = call.teacher.x, &weight_y = call.teacher.weight;
  check_linear(op, x, weight, bias);
  TORCH_CHECK(weight.sym_size(0) != 0, "torchkiln.", op, ": weight: got shape ", weight.sym_sizes(),
              ", expected at least 1 row: one for each class");
  check_same_dtype(op, "y", y, "x", x);
  check_linear(op, y, weight_y, call.teacher.bias, kTeacher);
  TORCH_CHECK(y.sym_sizes().slice(0, y.dim() - 1).equals(call.shape()), "torchkiln.", op,
              ": y: got shape ", y.sym_sizes(), ", expected the rows of x, whose shape is ",
              x.sym_sizes());
  TORCH_CHECK(weight_y.sym_size(0) == weight.sym_size(0), "torchkiln.", op,
              ": weight_y: got shape ", weight_y.sym_sizes(), ", expected ", weight.sym_size(0),
              " as the first size, the classes of weight");
  check_temperature(op, call.temperature);
  TORCH_CHECK_VALUE(call.direction != DivergenceKind::js || is_share(call.beta, x.scalar_type()),
                    "torchkiln.", op, ": beta: got ", call.beta,
                    ", expected a number greater than 0 and less than 1");
}

/// The call with x and y as rows, and logits that are not rounded.
inline Call in_rows(const Call& call) {
  Call flat = call;
  for (LogitLayer* layer : {&flat.student, &flat.teacher}) {
    layer->x = as_matrix(layer->x);
    layer->dtype = compute_dtype(layer->x.scalar_type());
  }
  return flat;
}

/// Bytes in a chunk per class and row: both layers' logits and the gradient.
inline int64_t bytes_of_logits(const LogitLayer& student) {
  const at::ScalarType wide = compute_dtype(student.x.scalar_type());
  return bytes_of_logit(student) + static_cast<int64_t>(c10::elementSize(wide));
}

/// Rows per chunk.
inline int64_t chunk_rows(const LogitLayer& student) {
  constexpr int64_t kLeast = 1024;
  const int64_t row = student.weight.size(0) * bytes_of_logits(student);
  return size_of_chunk(student.x.size(0), row, kLeast, kMostRowsOfChunk);
}

/// The incoming gradients, for gradients of logits that are then rounded to the dtype of x. The
/// range of float16 is small, so for float16 they are divided by `factor`. A gradient of a logit
/// then reaches 64 where the logarithms differ by 1. It loses precision below 6e-5, which it has
/// for a probability of 1e-6.
struct RoundedGradients {
  Tensor grads;   // [rows]
  Tensor factor;  // one number; undefined for 1

  RoundedGradients(const Tensor& given, const LogitLayer& student, double temperature)
      : grads(given) {
    constexpr double kLargest = 64;
    if (student.x.scalar_type() != at::kHalf) return;
    const Tensor largest = given.abs().amax().nan_to_num(1, 1, 1);
    factor = (largest / (kLargest * temperature)).clamp_min(std::numeric_limits<float>::min());
    grads = given / factor;
  }
};

/// Forward saves 6 numbers per row, as [6, rows]: log-sum-exp, mass and sum of terms of the
/// student, and the same three of the teacher.
inline constexpr int64_t kNumbers = 6, kOfStudent = 2, kOfTeacher = 5;

/// Computes the divergence of a chunk of rows, and its gradient.
class ChunkDivergence {
 public:
  /// `teacher`: the teacher's layer, which may be reduced to some of its classes. Chunks have at
  /// most `rows` rows.
  ChunkDivergence(const Call& flat, const LogitLayer& teacher, const Tensor& state, int64_t rows)
      : call_(flat), state_(state), teacher_(kName, teacher, rows) {}

  /// Computes the logits of both layers, for a chunk of rows.
  void compute(ChunkLogits& student, const Rows& chunk) {
    arguments_ = {};
    student_logits_ = student.compute(chunk);
    teacher_logits_ = teacher_.compute(chunk);
    const Tensor numbers = state_.view({kNumbers, -1});
    const auto number = [&](int64_t i) { return chunk.of(numbers.select(0, i)).data_ptr(); };
    const auto rows_of = [&](const Tensor& logits, int64_t first) {
      return DistributionRows{logits.const_data_ptr(), logits.stride(0), number(first),
                              number(first + 1)};
    };
    arguments_.student = rows_of(student_logits_, 0);
    arguments_.teacher = rows_of(teacher_logits_, kOfStudent + 1);
    arguments_.dtype = dtype_of(student_logits_);
    arguments_.rows = chunk.count;
    arguments_.classes = student_logits_.size(1);
    arguments_.scale = 1 / call_.temperature;
    arguments_.kind = call_.direction;
    arguments_.beta = call_.beta;
    arguments_.of_student = number(kOfStudent);
    arguments_.of_teacher = number(kOfTeacher);
  }
  /// Computes the numbers of each row from the logits, and the divergence into `found`, [rows]. If
  /// `is_known`, the log-sum-exps and masses are read instead: the state has them for all classes.
  void run(const Tensor& found, const Rows& chunk, bool is_known) {
    const int64_t rows = state_.numel() / kNumbers;
    // The target may be any class, because the divergence overwrites its log-probability.
    const Tensor target = at::zeros({chunk.count}, found.options().dtype(at::kLong));
    const LossOptions options = logprob_options(call_.temperature, /*ignore_index=*/-1);
    const auto run_layer = [&](const Tensor& logits, int64_t first) {
      const Tensor numbers = state_.narrow(0, first * rows, 3 * rows);
      run_forward(kName, logits, target, options, found,
                  row_state(numbers, rows, LossReduction::none, chunk.begin));
    };
    if (!is_known) {
      run_layer(student_logits_, 0);
      run_layer(teacher_logits_, kOfStudent + 1);
    }
    arguments_.divergence = found.data_ptr();
    launch(
        kName, found, chunk.count, row_grain(arguments_.classes),
        [&](auto stream) { return cuda::divergence(arguments_, stream); },
        [&](int64_t begin, int64_t end) { return cpu::divergence(arguments_, begin, end); });
  }
  /// Replaces the logits of the student by their gradient or, if they are wide, writes it to other
  /// memory. `grad` is the incoming gradient, [rows]; undefined for ones.
  const Tensor& differentiate(ChunkLogits& student, const Tensor& grad = {}) {
    const Tensor& outputs = student.gradient_memory();
    const Tensor own = student.own(outputs);
    arguments_.grad = grad.defined() ? grad.const_data_ptr() : nullptr;
    arguments_.grad_logits = own.data_ptr();
    arguments_.grad_logits_dtype = dtype_of(own);
    arguments_.grad_logits_row_stride = own.stride(0);
    launch(
        kName, own, arguments_.rows, row_grain(arguments_.classes),
        [&](auto stream) { return cuda::divergence_gradient(arguments_, stream); },
        [&](int64_t begin, int64_t end) {
          return cpu::divergence_gradient(arguments_, begin, end);
        });
    return outputs;
  }

  /// The product of the gradient of the logits and the student's weight, [rows, features], not
  /// rounded. It has new memory in forward and in backward, because the bits of a product may
  /// depend on the alignment.
  Tensor slopes(const ChunkLogits& student, const Tensor& outputs) const {
    const Tensor found = at::empty({outputs.size(0), call_.student.x.size(1)}, state_.options());
    add_product(found, outputs, student.layer().weight, /*is_first=*/true);
    return found;
  }

 private:
  const Call& call_;
  const Tensor& state_;
  ChunkLogits teacher_;
  Tensor student_logits_, teacher_logits_;
  Divergence arguments_{};
};

}  // namespace torchkiln::linear_kl_ops
