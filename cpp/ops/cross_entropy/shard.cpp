// cross_entropy() and logprob() of logits whose classes are distributed over processes. Each
// process computes a few numbers per row from its shard. torchkiln.distributed exchanges them and
// computes the state of whole rows, from which each process computes the gradient of its shard.

#include "cross_entropy/logprob.h"

namespace torchkiln::cross_entropy_ops {
namespace {

using at::Tensor;

void check_shard(const char* op, const Tensor& logits, const Tensor& target,
                 const LossOptions& options) {
  check_loss(op, logits, target, options);
  TORCH_CHECK(logits.dim() <= 2, "torchkiln.", op, ": logits: got shape ", logits.sym_sizes(),
              ", expected [rows, classes] or [classes]");
  TORCH_CHECK(target.scalar_type() == at::kLong, "torchkiln.", op, ": target: got dtype ",
              dtype_name(target.scalar_type()), ", expected int64, of classes");
  TORCH_CHECK(options.first_class >= 0 &&
                  logits.sym_size(class_dim(logits)) + options.first_class <= options.all_classes,
              "torchkiln.", op, ": first_class: got ", options.first_class, " for a shard of ",
              logits.sym_size(class_dim(logits)),
              " classes, expected a shard that lies within the ", options.all_classes,
              " classes of all shards");
}

/// Checks the state, [count, rows]: numbers of whole rows, joined from the results of all shards.
void check_state(const char* op, const Tensor& state, int64_t count, const Tensor& logits) {
  const at::ScalarType compute = compute_dtype(logits.scalar_type());
  const c10::SymInt rows = sym_row_count(logits);
  TORCH_CHECK(state.scalar_type() == compute && state.is_contiguous() && state.dim() == 2 &&
                  state.sym_size(0) == count && state.sym_size(1) == rows,
              "torchkiln.", op, ": state: got ", dtype_name(state.scalar_type()), " ",
              state.sym_sizes(), ", expected contiguous ", dtype_name(compute), " [", count, ", ",
              rows, "]");
}

/// The options of a shard's losses, which have no z-loss and are not reduced to a mean.
struct ShardOptions : LossOptions {
  ShardOptions() { reduction = LossReduction::sum; }

  TORCHKILN_FIELDS(self.weight, self.ignore_index, self.label_smoothing, self.first_class,
                   self.all_classes);
};

// ---- forward: numbers of each row ----

struct Shard {
  static constexpr bool kFlexibleLayout = true;
  static constexpr const char* kSchema =
      "torchkiln::_cross_entropy_shard(Tensor logits, Tensor target, Tensor? weight, "
      "int ignore_index, float label_smoothing, int first_class, int all_classes) -> Tensor";

  /// Returns [5, rows]: the maximum, the sum of exp(logits - maximum), the sum of q * (logits -
  /// maximum), the sum of q, and the weight of the target class, 0 if another shard has it.
  static Tensor meta(const Tensor& logits, const Tensor& target, const ShardOptions& options) {
    check_shard("cross_entropy_shard", logits, target, options);
    return empty_of({c10::SymInt(5), sym_row_count(logits)},
                    logits.options().dtype(compute_dtype(logits.scalar_type())));
  }

  static Tensor kernel(const Tensor& logits, const Tensor& target, const ShardOptions& options) {
    const Tensor numbers = meta(logits, target, options);
    if (numbers.numel() == 0) return numbers;
    const auto at = [&](int64_t i) { return numbers.select(0, i).data_ptr(); };
    const RowState kept{at(0), at(3), at(4), nullptr, nullptr, at(1)};
    run_forward("cross_entropy_shard", logits, target, options, numbers.select(0, 2), kept);
    return numbers;
  }
};

// ---- backward: the gradient of the logits of the shard ----

struct ShardBackwardOptions : ShardOptions {
  Tensor state;  // [2, rows]: log-sum-exp and mass of the whole rows

  TORCHKILN_FIELDS(self.weight, self.state, self.ignore_index, self.label_smoothing,
                   self.first_class, self.all_classes);
};

struct ShardBackward {
  static constexpr const char* kName = "cross_entropy_shard_backward";
  static constexpr bool kFlexibleLayout = true;
  static constexpr const char* kSchema =
      "torchkiln::_cross_entropy_shard_backward(Tensor grad, Tensor logits, Tensor target, "
      "Tensor? weight, Tensor state, int ignore_index, float label_smoothing, int first_class, "
      "int all_classes) -> Tensor";

  /// `grad` has one number per row, or one number for all rows.
  static Tensor meta(const Tensor& grad, const Tensor& logits, const Tensor& target,
                     const ShardBackwardOptions& options) {
    const Tensor& state = options.state;
    check_shard(kName, logits, target, options);
    check_tensors(kName, {{"logits", logits}, {"grad", grad}, {"state", state}});
    check_dtype(kName, "grad", grad);
    TORCH_CHECK(grad.dim() == 0 || grad.sym_sizes().equals(target.sym_sizes()), "torchkiln.", kName,
                ": grad: got shape ", grad.sym_sizes(), ", expected [] or that of target, ",
                target.sym_sizes());
    check_state(kName, state, 2, logits);
    return empty_contiguous(logits);
  }

  static Tensor kernel(const Tensor& grad, const Tensor& logits, const Tensor& target,
                       ShardBackwardOptions options) {
    const Tensor found = meta(grad, logits, target, options);
    if (found.numel() == 0) return found;
    if (grad.dim() > 0) options.reduction = LossReduction::none;
    const Tensor& state = options.state;
    void* mass = state.select(0, 1).data_ptr();
    const RowState kept{state.data_ptr(), mass, /*target_weight=*/nullptr, nullptr, nullptr};
    run_backward(kName, grad, *class_rows(logits), target, options, kept, *class_rows(found));
    return found;
  }
};

// ---- log-probabilities: numbers of each row, then the gradient ----

struct LogprobOptions {
  double temperature = 1;
  int64_t ignore_index = -100;
  int64_t first_class = 0;
  int64_t all_classes = 0;

  TORCHKILN_FIELDS(self.temperature, self.ignore_index, self.first_class, self.all_classes);

  LossOptions kernel_options() const {
    LossOptions options = logprob_options(temperature, ignore_index);
    options.first_class = first_class;
    options.all_classes = all_classes;
    return options;
  }
};

struct LogprobShard {
  static constexpr const char* kName = "logprob_shard";
  static constexpr const char* kSchema =
      "torchkiln::_logprob_shard(Tensor logits, Tensor target, float temperature, "
      "int ignore_index, int first_class, int all_classes) -> Tensor";

  /// [5, rows] for z = logits / temperature: the maximum, the sum of exp(z - maximum), z - maximum
  /// of the target class and the number 1, both 0 if another shard has this class, and the sum of
  /// exp(z - maximum) * (z - maximum).
  static Tensor meta(const Tensor& logits, const Tensor& target, const LogprobOptions& options) {
    check_shard(kName, logits, target, options.kernel_options());
    check_temperature(kName, options.temperature);
    return empty_of({c10::SymInt(5), sym_row_count(logits)},
                    logits.options().dtype(compute_dtype(logits.scalar_type())));
  }
  static Tensor kernel(const Tensor& logits, const Tensor& target, const LogprobOptions& options) {
    const Tensor numbers = meta(logits, target, options);
    if (numbers.numel() == 0) return numbers;
    const auto at = [&](int64_t i) { return numbers.select(0, i).data_ptr(); };
    RowState kept{at(0), at(3), at(3), nullptr, nullptr, at(1)};
    kept.entropy = at(4);
    run_forward(kName, logits, target, options.kernel_options(), numbers.select(0, 2), kept);
    return numbers;
  }
};

struct LogprobShardBackward {
  struct Options : LogprobOptions {
    Tensor grad_entropy, state;

    template <class Self>
    static auto fields(Self& self) {
      return std::tuple_cat(std::tie(self.grad_entropy, self.state), LogprobOptions::fields(self));
    }
  };
  static constexpr const char* kName = "logprob_shard_backward";
  static constexpr const char* kSchema =
      "torchkiln::_logprob_shard_backward(Tensor grad, Tensor logits, Tensor target, "
      "Tensor grad_entropy, Tensor state, float temperature, int ignore_index, int first_class, "
      "int all_classes) -> Tensor";

  /// `state`, [3, rows]: log-sum-exp, the factor of exp(z - log-sum-exp), and the entropy.
  static Tensor meta(const Tensor& grad, const Tensor& logits, const Tensor& target,
                     const Options& options) {
    const Tensor& state = options.state;
    check_shard(kName, logits, target, options.kernel_options());
    check_tensors(kName, {{"logits", logits}, {"state", state}});
    const auto check_grad = [&](const char* name, const Tensor& given) {
      check_tensors(kName, {{"logits", logits}, {name, given}});
      check_same_dtype(kName, name, given, "state", state);
      check_same_shape(kName, name, given, "target", target);
    };
    check_grad("grad", grad);
    check_grad("grad_entropy", options.grad_entropy);
    check_state(kName, state, 3, logits);
    return empty_contiguous(logits);
  }
  static Tensor kernel(const Tensor& grad, const Tensor& logits, const Tensor& target,
                       const Options& options) {
    const Tensor found = meta(grad, logits, target, options);
    if (found.numel() == 0) return found;
    const auto at = [&](int64_t i) { return options.state.select(0, i).data_ptr(); };
    RowState kept{at(0), at(1), /*target_weight=*/nullptr, nullptr, nullptr};
    kept.entropy = at(2);
    run_backward(kName, grad, *class_rows(logits), target, options.kernel_options(), kept,
                 *class_rows(found), options.grad_entropy.contiguous());
    return found;
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) {
  define<Shard, ShardBackward, LogprobShard, LogprobShardBackward>(m);
}

}  // namespace torchkiln::cross_entropy_ops
