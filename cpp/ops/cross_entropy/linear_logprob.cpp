// linear_logprob(): logprob() of the outputs of a linear layer, a chunk of rows at a time. Forward
// saves a few numbers per row. Backward computes the logits again, a chunk of rows or of classes at
// a time, and from their gradient the gradients of x, weight and bias.

#include "cross_entropy/class_chunks.h"
#include "cross_entropy/counted_rows.h"
#include "cross_entropy/logprob.h"
#include "detail/check_linear.h"
#include "matmul/kernel.h"
#include "torchkiln/torch/ops.h"

namespace torchkiln::linear_logprob_ops {
namespace {

using at::Tensor;
using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

inline constexpr const char* kName = "linear_logprob";

/// The arguments of a call.
struct Call {
  LogitLayer layer;  // x of any shape
  Tensor target;
  MaybeTensor rows;
  int64_t ignore_index = -100;
  double temperature = 1;
  bool entropy = false;

  TORCHKILN_FIELDS(self.layer.x, self.layer.weight, self.target, self.layer.bias, self.temperature,
                   self.layer.softcap, self.rows, self.ignore_index, self.entropy,
                   self.layer.dtype);

  LossOptions kernel_options() const { return logprob_options(temperature, ignore_index); }
};

void check(const char* op, const Call& call) {
  const auto& [x, weight, bias, softcap, one, dtype] = call.layer;
  check_linear(op, x, weight, bias);
  TORCH_CHECK(weight.sym_size(0) != 0, "torchkiln.", op, ": weight: got shape ", weight.sym_sizes(),
              ", expected at least 1 row: one for each class");
  check_tensors(op, {{"x", x}, {"target", call.target}});
  TORCH_CHECK(call.target.scalar_type() == at::kLong, "torchkiln.", op, ": target: got dtype ",
              dtype_name(call.target.scalar_type()), ", expected int64, of classes");
  const c10::SymIntArrayRef rows = x.sym_sizes().slice(0, x.dim() - 1);
  TORCH_CHECK(call.target.sym_sizes().equals(rows), "torchkiln.", op, ": target: got shape ",
              call.target.sym_sizes(), ", expected ", rows, " for x of shape ", x.sym_sizes(),
              ": a class for each row");
  if (softcap) check_softcap(op, *softcap);
  check_temperature(op, call.temperature);
  const at::ScalarType own = x.scalar_type(), wide = compute_dtype(own);
  TORCH_CHECK(!dtype || is_supported_dtype(*dtype), "torchkiln.", op, ": dtype: got ",
              dtype_name(dtype.value_or(own)), ", expected ", kSupportedDtypes);
  TORCH_CHECK(!dtype || *dtype == own || *dtype == wide, "torchkiln.", op, ": dtype: got ",
              dtype_name(dtype.value_or(own)), ", expected ", dtype_name(wide),
              own == wide ? "" : " or " + dtype_name(own), ": the dtype of the logits");
}

/// The call with x and target as rows, and with the dtype of the logits set.
Call in_rows(const Call& call) {
  Call flat = call;
  flat.layer.x = as_matrix(call.layer.x);
  flat.target = call.target.reshape({-1});
  flat.layer.dtype = call.layer.dtype.value_or(compute_dtype(call.layer.x.scalar_type()));
  return flat;
}

struct Forward {
  static constexpr const char* kSchema =
      "torchkiln::_linear_logprob_forward(Tensor x, Tensor weight, Tensor target, Tensor? bias, "
      "float temperature, float? softcap, Tensor? rows, int ignore_index, bool entropy, "
      "ScalarType? dtype) -> (Tensor, Tensor, Tensor)";

  static Three meta(const Call& call) {
    check(kName, call);
    const auto [logp, entropy, state] =
        empty_logprob(call.layer.x, call.target.sym_sizes(), call.entropy);
    return {logp, entropy, state};
  }
  static Three kernel(const Call& call) {
    const Three outputs = meta(call);
    const auto& [logp, entropy, state] = outputs;
    const int64_t rows = call.target.numel();
    if (rows == 0) return outputs;
    const Call flat = in_rows(call);
    const Tensor numbers = logp.view({rows}), entropies = entropy.view({-1});
    for_each_chunk_of_logits(
        kName, flat.layer, {}, Tensor(), Tensor(),
        [&, &state = state](ChunkLogits& logits, const LayerGradients&, const Rows& chunk) {
          RowState kept = row_state(state, rows, LossReduction::none, chunk.begin);
          if (call.entropy) kept.entropy = chunk.of(entropies).data_ptr();
          run_forward(kName, logits.compute(chunk), chunk.of(flat.target), flat.kernel_options(),
                      chunk.of(numbers), kept);
        });
    return outputs;
  }
};

struct Backward {
  struct Arguments : Call {
    MaybeTensor grad, grad_entropy;
    Tensor entropies, state;  // results of forward
    Wanted wanted;

    template <class Self>
    static auto fields(Self& self) {
      return std::tuple_cat(Call::fields(self), std::tie(self.grad, self.grad_entropy,
                                                         self.entropies, self.state, self.wanted));
    }
  };
  static constexpr const char* kName = "linear_logprob_backward";
  static constexpr const char* kSchema =
      "torchkiln::_linear_logprob_backward(Tensor x, Tensor weight, Tensor target, Tensor? bias, "
      "float temperature, float? softcap, Tensor? rows, int ignore_index, bool entropy, "
      "ScalarType? dtype, Tensor? grad, Tensor? grad_entropy, Tensor entropies, Tensor state, "
      "bool[3] wanted) -> (Tensor, Tensor, Tensor)";

  static Three outputs(const Arguments& call, const Wanted& wanted) {
    check(kName, call);
    check_logprob_grads(kName, call.layer.x.scalar_type(), call.target, call.entropies, call.state,
                        call.grad, call.grad_entropy);
    return empty_gradients(call.layer, wanted);
  }
  static Three meta(const Arguments& call) { return outputs(call, call.wanted); }
  static Three kernel(const Arguments& call) {
    const int64_t rows = call.target.numel();
    Three found = outputs(call, rows == 0 ? call.wanted : without_weight(call.wanted));
    auto& [grad_x, grad_weight, grad_bias] = found;
    if (rows == 0) {
      for (const Tensor& each : {grad_x, grad_weight, grad_bias}) each.zero_();
      return found;
    }
    const Call flat = in_rows(call);
    const LogprobGrads grads(call.grad, call.grad_entropy, call.state);
    const Tensor entropies = call.entropies.view({-1});
    const int64_t all_classes = flat.layer.weight.size(0);
    const Tensor of_weight = for_each_part_of_logits(
        kName, flat.layer, call.wanted, grad_x, grad_bias,
        [&](ChunkLogits& logits, const Rows& chunk, const Classes& classes) {
          logits.compute(chunk);
          RowState kept = row_state(call.state, rows, LossReduction::none, chunk.begin);
          Tensor of_entropy;
          if (grads.entropy.defined()) {
            kept.entropy = chunk.of(entropies).data_ptr();
            of_entropy = chunk.of(grads.entropy);
          }
          return logits.differentiate(kName, chunk.of(grads.logp), chunk.of(flat.target),
                                      part_of(flat.kernel_options(), classes, all_classes), kept,
                                      of_entropy);
        });
    if (call.wanted[1]) grad_weight = of_weight;
    return found;
  }
};

struct Op {
  static constexpr const char* kName = linear_logprob_ops::kName;
  static constexpr const char* kSchema =
      "torchkiln::linear_logprob(Tensor x, Tensor weight, Tensor target, Tensor? bias=None, *, "
      "float temperature=1.0, float? softcap=None, Tensor? rows=None, int ignore_index=-100, "
      "bool entropy=False, ScalarType? dtype=None) -> (Tensor, Tensor)";

  static Two meta(const Call& call) {
    const auto [logp, entropy, state] = Forward::meta(call);
    return {logp, entropy};
  }
  static Two kernel(const Call& call) {
    const auto [logp, entropy, state] = Forward::kernel(call);
    return {logp, entropy};
  }
  /// All logits, with torch's own ops, in the dtype of the results unless a dtype is given.
  static Two composite(const Call& call) {
    check(kName, call);
    const LogitLayer& layer = call.layer;
    const at::ScalarType wide = compute_dtype(layer.x.scalar_type());
    Tensor logits = composite_logits(layer, layer.dtype.value_or(wide));
    if (layer.softcap) logits = capped(kName, logits, *layer.softcap);
    if (call.temperature != 1) logits = logits / call.temperature;
    return composite_logprob(logits, call.target, call.ignore_index, call.entropy);
  }
  static Two recorded(const Below& below, const Call& call) {
    const auto& [x, weight, maybe_bias, softcap, one, dtype] = call.layer;
    const Tensor bias = tensor_or_undefined(maybe_bias);
    const auto [logp, entropy, state] = below.call<Forward>(call);
    Call numbers = call;  // without tensors, which keep() saves
    numbers.layer.x = numbers.layer.weight = numbers.target = Tensor();
    numbers.layer.bias = std::nullopt;
    return record(kName, {x, weight, bias}, Two{logp, entropy},
                  keep(x, weight, bias, call.target, entropy, state),
                  [numbers](const Incoming& in, const Kept<6>& kept) {
                    const auto& [x, weight, bias, target, entropy, state] = kept;
                    Backward::Arguments given;
                    static_cast<Call&>(given) = numbers;
                    given.target = target;
                    const auto put = [&](const auto& inputs) {
                      given.layer.x = inputs[0];
                      given.layer.weight = inputs[1];
                      given.layer.bias = maybe(inputs[2]);
                    };
                    const std::array parameters{x, weight, bias};
                    if (in.needs_composite()) {
                      return composite_gradients(in, parameters, [&](const auto& inputs) {
                        put(inputs);
                        return composite(given);
                      });
                    }
                    put(parameters);
                    given.grad = maybe(in[0]);
                    if (numbers.entropy) given.grad_entropy = maybe(in[1]);
                    given.entropies = entropy;
                    given.state = state;
                    given.wanted = {in.wants(0), in.wants(1), in.wants(2)};
                    std::array<Tensor, 3> found;
                    std::tie(found[0], found[1], found[2]) = call_below<Backward>(given);
                    variable_list gradients(3);
                    for (size_t i = 0; i < gradients.size(); ++i)
                      if (in.wants(i)) gradients[i] = found[i].to(parameters[i].scalar_type());
                    return gradients;
                  });
  }
  static Two autocast(const Autocast& cast, Call call) {
    auto& [x, weight, bias, softcap, one, dtype] = call.layer;
    check_tensors(kName, {{"x", x}, {"weight", weight}});
    x = cast(x);
    weight = cast(weight);
    if (bias && bias->scalar_type() != at::kFloat) bias = cast(bias);
    return torchkiln::call<Op>(call);
  }

  /// With `rows`: computes these rows, and fills the others with zeros.
  static std::optional<Two> rewritten(const Call& call) {
    if (!call.rows) return std::nullopt;
    check(kName, call);
    const c10::SymIntArrayRef shape = call.target.sym_sizes();
    const Tensor rows = counted_rows(kName, call.layer.x, *call.rows, shape);
    Call some = call;
    some.rows = std::nullopt;
    some.layer.x = as_matrix(call.layer.x).index_select(0, rows);
    some.target = call.target.reshape({-1}).index_select(0, rows);
    const auto [logp, entropy] = torchkiln::call<Op>(some);
    return Two{among_zeros(logp, rows, shape),
               call.entropy ? among_zeros(entropy, rows, shape) : entropy};
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) { define<Forward, Backward, Op>(m); }

}  // namespace torchkiln::linear_logprob_ops

namespace torchkiln {

std::tuple<at::Tensor, at::Tensor> linear_logprob(const at::Tensor& x, const at::Tensor& weight,
                                                  const at::Tensor& target,
                                                  const std::optional<at::Tensor>& bias,
                                                  const LinearLogprobOptions& options) {
  return call<linear_logprob_ops::Op>(x, weight, target, bias, options);
}

}  // namespace torchkiln
