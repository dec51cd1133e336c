// linear_kl(): the divergence of two linear layers' softmax per row, a chunk of rows at a time. The
// kernels of logprob() compute the log-sum-exps of both layers' logits, those of divergence.cu the
// divergence and its gradient, which overwrites the student's logits. If x is the only tensor of
// the student that requires a gradient, forward computes its gradient for incoming gradients of 1,
// and backward multiplies the rows. Else backward computes the chunks again. The gradients of the
// teacher are those of the student with the layers exchanged.

#include "cross_entropy/linear_kl.h"

#include "cross_entropy/counted_rows.h"
#include "torchkiln/torch/ops.h"

namespace torchkiln::linear_kl_ops {
namespace {

using Three = std::tuple<Tensor, Tensor, Tensor>;

/// Checks the numbers of each row, which forward saves.
void check_state(const char* op, const Call& call, const Tensor& state, const c10::SymInt& rows) {
  check_tensors(op, {{"x", call.student.x}, {"state", state}});
  check_vector(op, "state", state, rows * kNumbers, "the numbers of each row");
  check_kept(op, "state", state, compute_dtype(call.student.x.scalar_type()));
}

struct Forward {
  struct Arguments : Call {
    MaybeTensor state;    // numbers over all classes, if these are the classes of a shard
    bool differentiates;  // computes grad_x, for incoming gradients of 1

    template <class Self>
    static auto fields(Self& self) {
      return std::tuple_cat(Call::fields(self), std::tie(self.state, self.differentiates));
    }
  };
  static constexpr const char* kName = linear_kl_ops::kName;
  static constexpr const char* kSchema =
      "torchkiln::_linear_kl_forward(Tensor x, Tensor weight, Tensor y, Tensor weight_y, "
      "Tensor? bias, Tensor? bias_y, float temperature, str direction, float beta, Tensor? rows, "
      "Tensor? state, bool differentiates) -> (Tensor, Tensor, Tensor)";

  /// The divergence, the numbers of each row, and the gradient of x in the compute dtype. With
  /// `state`, the divergence and its terms are the part that the classes of this shard contribute.
  static Three meta(const Arguments& call) {
    check(kName, call);
    const Tensor& x = call.student.x;
    const auto wide = x.options().dtype(compute_dtype(x.scalar_type()));
    const Tensor found = empty_of(call.shape(), wide);
    if (call.state) check_state(kName, call, *call.state, found.sym_numel());
    return {found, empty_of({kNumbers * found.sym_numel()}, wide),
            call.differentiates ? empty_of(x.sym_sizes(), wide) : no_output(found)};
  }
  static Three kernel(const Arguments& call) {
    const Three outputs = meta(call);
    const auto& [found, state, grad_x] = outputs;
    if (found.numel() == 0) return outputs;
    const Call flat = in_rows(call);
    if (call.state) state.copy_(*call.state);
    const Tensor divergences = found.view({-1});
    const Tensor slopes = call.differentiates ? as_matrix(grad_x) : Tensor();
    const int64_t size = chunk_rows(flat.student);
    ChunkDivergence both(flat, flat.teacher, state, size);
    for_each_chunk_of_logits(
        kName, flat.student, {}, Tensor(), Tensor(), size,
        [&](ChunkLogits& logits, const LayerGradients&, const Rows& chunk) {
          both.compute(logits, chunk);
          both.run(chunk.of(divergences), chunk, call.state.has_value());
          if (slopes.defined())
            chunk.of(slopes).copy_(both.slopes(logits, both.differentiate(logits)));
        });
    return outputs;
  }
};

struct Backward {
  struct Arguments : Call {
    Tensor grad, state;
    Wanted wanted;

    template <class Self>
    static auto fields(Self& self) {
      return std::tuple_cat(Call::fields(self), std::tie(self.grad, self.state, self.wanted));
    }
  };
  static constexpr const char* kName = "linear_kl_backward";
  static constexpr const char* kSchema =
      "torchkiln::_linear_kl_backward(Tensor x, Tensor weight, Tensor y, Tensor weight_y, "
      "Tensor? bias, Tensor? bias_y, float temperature, str direction, float beta, Tensor? rows, "
      "Tensor grad, Tensor state, bool[3] wanted) -> (Tensor, Tensor, Tensor)";

  static Three outputs(const Arguments& call, const Wanted& wanted) {
    check(kName, call);
    const Tensor& grad = call.grad;
    check_tensors(kName, {{"x", call.student.x}, {"grad", grad}});
    check_dtype(kName, "grad", grad);
    TORCH_CHECK(grad.sym_sizes().equals(call.shape()), "torchkiln.", kName, ": grad: got shape ",
                grad.sym_sizes(), ", expected ", call.shape());
    check_state(kName, call, call.state, grad.sym_numel());
    return empty_gradients(call.student, wanted);
  }
  static Three meta(const Arguments& call) { return outputs(call, call.wanted); }
  static Three kernel(const Arguments& call) {
    const bool is_empty = call.grad.numel() == 0;
    Three found = outputs(call, is_empty ? call.wanted : without_weight(call.wanted));
    auto& [grad_x, grad_weight, grad_bias] = found;
    if (is_empty) {
      for (const Tensor& each : {grad_x, grad_weight, grad_bias}) each.zero_();
      return found;
    }
    const Call flat = in_rows(call);
    const LogitLayer& student = flat.student;
    const Tensor grads = call.grad.reshape({-1}).to(call.state.scalar_type()).contiguous();
    const Wanted layer{false, call.wanted[1], call.wanted[2]};
    const RoundedGradients rounded(grads, student, call.temperature);
    const int64_t rows_of_chunk = chunk_rows(student);
    const auto size = classes_per_chunk(student, layer, rows_of_chunk, bytes_of_logits(student));
    const Tensor rows_of_x = call.wanted[0] ? as_matrix(grad_x) : Tensor();
    const Tensor sum_of_x =
        size && call.wanted[0] ? at::empty(rows_of_x.sizes(), grads.options()) : Tensor();
    std::optional<ChunkDivergence> both;
    const auto body = [&](ChunkLogits& logits, const Rows& chunk, const Classes& classes) {
      if (chunk.begin == 0)
        both.emplace(flat, part_of(flat.teacher, classes), call.state, chunk.count);
      both->compute(logits, chunk);
      const bool is_wide = student.is_wide();
      const Tensor own = chunk.of(rounded.grads);
      if (is_wide && !rows_of_x.defined()) return both->differentiate(logits, own);
      Tensor outputs = both->differentiate(logits);
      const Tensor factors = chunk.of(grads).unsqueeze(-1);
      if (!rows_of_x.defined()) return outputs.mul_(factors);
      if (sum_of_x.defined()) {
        add_product(sum_of_x, outputs, logits.layer().weight, classes.begin == 0);
      } else {
        chunk.of(rows_of_x).copy_(both->slopes(logits, outputs).mul_(factors));
      }
      if (!layer[1] && !layer[2]) return outputs;
      // Wide logits are still in memory, so the gradient is computed again with the incoming
      // gradient, and rounded once.
      return is_wide ? both->differentiate(logits, own) : outputs.mul_(factors);
    };
    const Tensor of_weight =
        size ? for_each_chunk_of_classes(kName, student, layer, Tensor(), grad_bias, *size, body)
             : for_each_chunk_of_logits(kName, student, layer, Tensor(), grad_bias, rows_of_chunk,
                                        of_row_chunks(student, body));
    if (sum_of_x.defined()) rows_of_x.copy_(sum_of_x.mul_(grads.unsqueeze(-1)));
    if (rounded.factor.defined()) {
      if (call.wanted[1]) of_weight.mul_(rounded.factor);
      if (call.wanted[2]) grad_bias.mul_(rounded.factor);
    }
    if (call.wanted[1]) grad_weight = of_weight;
    return found;
  }
};

using Gradients = std::array<Tensor, 3>;

/// The gradients of the student, in the dtypes of its tensors.
Gradients gradients_of(const Call& call, const Tensor& grad, const Tensor& state,
                       const Wanted& wanted) {
  Backward::Arguments given;
  static_cast<Call&>(given) = call;
  given.grad = grad;
  given.state = state;
  given.wanted = wanted;
  Gradients found;
  std::tie(found[0], found[1], found[2]) = call_below<Backward>(given);
  const LogitLayer& layer = call.student;
  const Gradients parameters{layer.x, layer.weight, tensor_or_undefined(layer.bias)};
  for (size_t i = 0; i < found.size(); ++i)
    if (wanted[i]) found[i] = found[i].to(parameters[i].scalar_type());
  return found;
}

struct Op {
  static constexpr const char* kName = linear_kl_ops::kName;
  static constexpr const char* kSchema =
      "torchkiln::linear_kl(Tensor x, Tensor weight, Tensor y, Tensor weight_y, "
      "Tensor? bias=None, Tensor? bias_y=None, *, float temperature=1.0, "
      "str direction='forward', float beta=0.5, Tensor? rows=None) -> Tensor";

  static Tensor meta(const Call& call) { return std::get<0>(Forward::meta({call, {}, false})); }
  static Tensor kernel(const Call& call) { return std::get<0>(Forward::kernel({call, {}, false})); }

  /// All logits, with torch's own ops.
  static Tensor composite(const Call& call) {
    check(kName, call);
    const at::ScalarType wide = compute_dtype(call.student.x.scalar_type());
    const auto logarithms = [&](const LogitLayer& layer) {
      return at::log_softmax(composite_logits(layer, wide) / call.temperature, -1);
    };
    const Tensor log_p = logarithms(call.student), log_q = logarithms(call.teacher);
    // A probability of 0 adds 0, although its logarithm is infinite.
    const auto divergence = [](const Tensor& logs, const Tensor& others) {
      const Tensor factor = logs.exp();
      return (factor * (logs - others).masked_fill(factor.eq(0), 0)).sum(-1);
    };
    Tensor rows;
    if (call.direction == DivergenceKind::forward) {
      rows = divergence(log_q, log_p);
    } else if (call.direction == DivergenceKind::reverse) {
      rows = divergence(log_p, log_q);
    } else {
      // Uses log1p, because std::log of a double would require glibc 2.29.
      const double log_beta = -std::log1p((1 - call.beta) / call.beta);
      const Tensor log_m = at::logaddexp(log_q + log_beta, log_p + std::log1p(-call.beta));
      rows = divergence(log_q, log_m) * call.beta + divergence(log_p, log_m) * (1 - call.beta);
    }
    return rows.reshape_symint(call.shape());
  }

  static Tensor recorded(const Below& below, const Call& call) {
    const Tensor &x = call.student.x, &weight = call.student.weight, &y = call.teacher.x,
                 &weight_y = call.teacher.weight;
    const Tensor bias = tensor_or_undefined(call.student.bias);
    const Tensor bias_y = tensor_or_undefined(call.teacher.bias);
    const auto needs = [](const Tensor& t) { return t.defined() && t.requires_grad(); };
    const bool differentiates = needs(x) && !needs(weight) && !needs(bias);
    const auto [found, state, slopes] =
        below.call<Forward>(Forward::Arguments{call, {}, differentiates});
    Call numbers = call;  // without tensors, which keep() saves
    numbers.student = numbers.teacher = LogitLayer{};
    return record(kName, {x, weight, bias, y, weight_y, bias_y}, found,
                  keep(x, weight, bias, y, weight_y, bias_y, state, slopes),
                  [numbers, differentiates](const Incoming& in, const Kept<8>& kept) {
                    Call given = numbers;
                    const auto put = [&given](const auto& inputs) {
                      given.student.x = inputs[0];
                      given.student.weight = inputs[1];
                      given.student.bias = maybe(inputs[2]);
                      given.teacher.x = inputs[3];
                      given.teacher.weight = inputs[4];
                      given.teacher.bias = maybe(inputs[5]);
                    };
                    std::array<Tensor, 6> inputs;
                    std::copy_n(kept.begin(), inputs.size(), inputs.begin());
                    if (in.needs_composite()) {
                      return composite_gradients(in, inputs, [&](const auto& leaves) {
                        put(leaves);
                        return composite(given);
                      });
                    }
                    put(inputs);
                    const Tensor &grad = in[0], &state = kept[6], &slopes = kept[7];
                    const Wanted student{in.wants(0), in.wants(1), in.wants(2)};
                    const Wanted teacher{in.wants(3), in.wants(4), in.wants(5)};
                    variable_list gradients(inputs.size());
                    const auto any = [](const Wanted& wanted) {
                      return wanted[0] || wanted[1] || wanted[2];
                    };
                    if (differentiates && student[0]) {
                      gradients[0] = (slopes * grad.unsqueeze(-1)).to(inputs[0].scalar_type());
                    } else if (any(student)) {
                      const Gradients of = gradients_of(given, grad, state, student);
                      std::copy(of.begin(), of.end(), gradients.begin());
                    }
                    if (any(teacher)) {
                      const Tensor other = at::cat({state.chunk(2)[1], state.chunk(2)[0]});
                      const Gradients of = gradients_of(given.exchanged(), grad, other, teacher);
                      std::copy(of.begin(), of.end(), gradients.begin() + 3);
                    }
                    return gradients;
                  });
  }
  static Tensor autocast(const Autocast& cast, Call call) {
    check_places(kName, call);
    for (LogitLayer* layer : {&call.student, &call.teacher}) {
      layer->x = cast(layer->x);
      layer->weight = cast(layer->weight);
      if (layer->bias && layer->bias->scalar_type() != at::kFloat) layer->bias = cast(*layer->bias);
    }
    return torchkiln::call<Op>(call);
  }
  /// With `rows`: computes these rows, and fills the others with zeros.
  static std::optional<Tensor> rewritten(const Call& call) {
    if (!call.rows) return std::nullopt;
    check(kName, call);
    const Tensor rows = counted_rows(kName, call.student.x, *call.rows, call.shape());
    Call some = call;
    some.rows = std::nullopt;
    for (LogitLayer* layer : {&some.student, &some.teacher})
      layer->x = as_matrix(layer->x).index_select(0, rows);
    return among_zeros(torchkiln::call<Op>(some), rows, call.shape());
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) { define<Forward, Backward, Op>(m); }

}  // namespace torchkiln::linear_kl_ops

namespace torchkiln {

at::Tensor linear_kl(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& y,
                     const at::Tensor& weight_y, const std::optional<at::Tensor>& bias,
                     const std::optional<at::Tensor>& bias_y, const LinearKlOptions& options) {
  return call<linear_kl_ops::Op>(x, weight, y, weight_y, bias, bias_y, options);
}

}  // namespace torchkiln
