// logprob(): the logarithm of the probability that a row of logits gives to a class, and the
// entropy of the row. Forward reads the logits once and saves three numbers per row. Backward reads
// the logits again and writes their gradient, from the incoming gradients of both results. The
// kernels are those of cross_entropy().

#include "cross_entropy/logprob.h"
#include "matmul/kernel.h"
#include "torchkiln/torch/ops.h"

namespace torchkiln::logprob_ops {
namespace {

using at::Tensor;
using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

void check(const char* op, const Tensor& logits, const Tensor& target,
           const LogprobOptions& options) {
  check_tensors(op, {{"logits", logits}, {"target", target}});
  check_dtype(op, "logits", logits);
  check_not_0_dim(op, "logits", logits);
  TORCH_CHECK(target.scalar_type() == at::kLong, "torchkiln.", op, ": target: got dtype ",
              dtype_name(target.scalar_type()), ", expected int64, of classes");
  const c10::SymIntArrayRef rows = logits.sym_sizes().slice(0, logits.dim() - 1);
  TORCH_CHECK(target.sym_sizes().equals(rows), "torchkiln.", op, ": target: got shape ",
              target.sym_sizes(), ", expected ", rows, " for logits of shape ", logits.sym_sizes(),
              ": a class for each row");
  TORCH_CHECK(logits.sym_size(-1) != 0, "torchkiln.", op, ": logits: got shape ",
              logits.sym_sizes(), ", expected at least 1 class");
  check_temperature(op, options.temperature);
}

struct Forward {
  static constexpr const char* kName = "logprob";
  static constexpr const char* kSchema =
      "torchkiln::_logprob_forward(Tensor logits, Tensor target, float temperature, "
      "int ignore_index, bool entropy) -> (Tensor, Tensor, Tensor)";

  static Three meta(const Tensor& logits, const Tensor& target, const LogprobOptions& options) {
    check(kName, logits, target, options);
    const auto [logp, entropy, state] = empty_logprob(logits, target.sym_sizes(), options.entropy);
    return {logp, entropy, state};
  }
  static Three kernel(const Tensor& logits, const Tensor& target, const LogprobOptions& options) {
    const Three outputs = meta(logits, target, options);
    const auto& [logp, entropy, state] = outputs;
    if (target.numel() == 0) return outputs;
    RowState kept = row_state(state, target.numel(), LossReduction::none);
    if (options.entropy) kept.entropy = entropy.data_ptr();
    run_forward(kName, *rows_of(logits), target,
                logprob_options(options.temperature, options.ignore_index), logp, kept);
    return outputs;
  }
};

struct BackwardOptions {
  MaybeTensor grad, grad_entropy;
  Tensor entropy, state;
  double temperature = 1;
  int64_t ignore_index = -100;

  TORCHKILN_FIELDS(self.grad, self.grad_entropy, self.entropy, self.state, self.temperature,
                   self.ignore_index);
};

struct Backward {
  static constexpr const char* kName = "logprob_backward";
  static constexpr const char* kSchema =
      "torchkiln::_logprob_backward(Tensor logits, Tensor target, Tensor? grad, "
      "Tensor? grad_entropy, Tensor entropy, Tensor state, float temperature, int ignore_index) "
      "-> Tensor";

  static Tensor meta(const Tensor& logits, const Tensor& target, const BackwardOptions& given) {
    check(kName, logits, target, {given.temperature, given.ignore_index});
    check_logprob_grads(kName, logits.scalar_type(), target, given.entropy, given.state, given.grad,
                        given.grad_entropy);
    return empty_contiguous(logits);
  }
  static Tensor kernel(const Tensor& logits, const Tensor& target, const BackwardOptions& given) {
    Tensor found = meta(logits, target, given);
    if (found.numel() == 0) return found;
    const LogprobGrads grads(given.grad, given.grad_entropy, given.state);
    RowState kept = row_state(given.state, target.numel(), LossReduction::none);
    if (given.grad_entropy) kept.entropy = given.entropy.data_ptr();
    run_backward(kName, grads.logp, *rows_of(logits), target,
                 logprob_options(given.temperature, given.ignore_index), kept, as_matrix(found),
                 grads.entropy);
    return found;
  }
};

struct Op {
  static constexpr const char* kName = "logprob";
  static constexpr const char* kSchema =
      "torchkiln::logprob(Tensor logits, Tensor target, *, float temperature=1.0, "
      "int ignore_index=-100, bool entropy=False) -> (Tensor, Tensor)";

  static Two meta(const Tensor& logits, const Tensor& target, const LogprobOptions& options) {
    const auto [logp, entropy, state] = Forward::meta(logits, target, options);
    return {logp, entropy};
  }
  static Two kernel(const Tensor& logits, const Tensor& target, const LogprobOptions& options) {
    const auto [logp, entropy, state] = Forward::kernel(logits, target, options);
    return {logp, entropy};
  }
  static Two composite(const Tensor& logits, const Tensor& target, const LogprobOptions& options) {
    check(kName, logits, target, options);
    Tensor rows = as_matrix(logits).to(compute_dtype(logits.scalar_type()));
    if (options.temperature != 1) rows = rows / options.temperature;
    return composite_logprob(rows, target, options.ignore_index, options.entropy);
  }
  static Two recorded(const Below& below, const Tensor& logits, const Tensor& target,
                      const LogprobOptions& options) {
    const auto [logp, entropy, state] = below.call<Forward>(logits, target, options);
    return record(
        kName, {logits}, Two{logp, entropy}, keep(logits, target, entropy, state),
        [options](const Incoming& in, const Kept<4>& kept) {
          const auto& [logits, target, entropy, state] = kept;
          if (in.needs_composite()) {
            // clang 15 cannot capture a structured binding by name.
            return composite_gradients(in, std::array{logits},
                                       [&options, &target = target](const auto& inputs) {
                                         return composite(inputs[0], target, options);
                                       });
          }
          return variable_list{call_below<Backward>(
              logits, target,
              BackwardOptions{maybe(in[0]), options.entropy ? maybe(in[1]) : std::nullopt, entropy,
                              state, options.temperature, options.ignore_index})};
        });
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) { define<Forward, Backward, Op>(m); }

}  // namespace torchkiln::logprob_ops

namespace torchkiln {

std::tuple<at::Tensor, at::Tensor> logprob(const at::Tensor& logits, const at::Tensor& target,
                                           const LogprobOptions& options) {
  return call<logprob_ops::Op>(logits, target, options);
}

}  // namespace torchkiln
