// The kernels of linear_cross_entropy(): checks, and loops over chunks. linear_chunks.h and
// class_chunks.h compute and differentiate a chunk; kernel.h has the kernels of the loss.

#include <limits>

#include "cross_entropy/class_chunks.h"
#include "cross_entropy/gradient_memory.h"
#include "cross_entropy/linear_cross_entropy.h"
#include "matmul/kernel.h"
#include "torchkiln/torch/empty.h"

namespace torchkiln::linear_cross_entropy_ops {

void check(const char* op, const Call& call) {
  const auto& [x, weight, bias, softcap, temperature, dtype] = call.layer;
  check_linear(op, x, weight, bias, kLayer);
  TORCH_CHECK(weight.sym_size(0) != 0, "torchkiln.", op, ": ", kLayer.weight, ": got shape ",
              weight.sym_sizes(), ", expected at least 1 row: one for each class");
  check_tensors(op, {{"x", x}, {"target", call.target}});
  TORCH_CHECK(call.target.scalar_type() == at::kLong, "torchkiln.", op, ": target: got dtype ",
              dtype_name(call.target.scalar_type()),
              ", expected int64, of classes; for probabilities call cross_entropy(linear(x, "
              "linear_weight, linear_bias), target)");
  const c10::SymIntArrayRef rows = x.sym_sizes().slice(0, x.dim() - 1);
  TORCH_CHECK(call.target.sym_sizes().equals(rows), "torchkiln.", op, ": target: got shape ",
              call.target.sym_sizes(), ", expected ", rows, " for x of shape ", x.sym_sizes(),
              ": a class for each row");
  if (call.loss.weight) {
    const Tensor& each = *call.loss.weight;
    check_tensors(op, {{"x", x}, {"weight", each}});
    check_parameter_dtype(op, "weight", each.scalar_type(), "x", x.scalar_type());
    check_vector(op, "weight", each, weight.sym_size(0), kLayer.rows);
  }
  check_loss_numbers(op, call.loss);
  if (softcap) check_softcap(op, *softcap);
  check_temperature(op, temperature);
}

void check_classes_if_asked(const Call& call) {
  if (call.loss.check_target && !call.target.is_meta())
    check_classes(kName, call.target, call.layer.weight.size(0), call.loss.ignore_index);
}

namespace {

/// The call with x and target as rows, and with class weights in the compute dtype.
Call in_rows(const Call& call) {
  Call flat = call;
  flat.layer.x = as_matrix(call.layer.x);
  flat.target = call.target.reshape({-1});
  if (call.loss.weight)
    flat.loss.weight = call.loss.weight->to(compute_dtype(flat.layer.x.scalar_type()));
  return flat;
}

}  // namespace

Five forward_outputs(const Call& call, Wanted wanted) {
  check(kName, call);
  const Tensor& x = call.layer.x;
  const bool each = call.loss.reduction == LossReduction::none;
  const c10::SymIntArrayRef shape = each ? call.target.sym_sizes() : c10::SymIntArrayRef();
  const c10::SymInt numbers = state_size(call.rows(), call.loss.reduction, call.loss.accuracy);
  const auto with = [&](at::ScalarType dtype) { return x.options().dtype(dtype); };
  return std::tuple_cat(std::tuple{empty_of(shape, with(call.loss_dtype())),
                                   empty_of({numbers}, with(compute_dtype(x.scalar_type())))},
                        empty_gradients(call.layer, wanted));
}

Five forward(const Call& call, Wanted wanted) {
  const int64_t rows = call.target.numel();
  Five outputs = forward_outputs(call, rows == 0 ? wanted : without_weight(wanted));
  auto& [loss, state, grad_x, grad_weight, grad_bias] = outputs;
  const LossReduction reduction = call.loss.reduction;
  check_classes_if_asked(call);
  if (rows == 0) {
    for (const Tensor& each : {state, grad_x, grad_weight, grad_bias}) each.zero_();
    loss.fill_(reduction == LossReduction::mean ? std::numeric_limits<double>::quiet_NaN() : 0);
    return outputs;
  }
  const Call flat = in_rows(call);
  const Tensor losses = at::empty({rows}, state.options());
  const bool wants_any = wanted[0] || wanted[1] || wanted[2];
  const Tensor inverse_temperature =
      wants_any ? at::full({}, 1 / call.layer.temperature, state.options()) : Tensor();
  const bool each = reduction == LossReduction::none;
  const LossSum total =
      sum_arguments(flat.layer.x, call.loss, losses, row_state(state, rows, reduction), loss);
  if (const auto parts = parts_in_gradient(flat.layer, flat.loss, wanted)) {
    grad_weight = forward_in_gradient(kName, flat.layer, flat.target, flat.loss, *parts, wanted,
                                      inverse_temperature, losses, state, grad_x, grad_bias);
    run_sum(kName, flat.layer.x, total);
    return outputs;
  }
  bool is_whole = false;  // whether all rows are one chunk
  LossOptions sum = flat.loss;
  sum.reduction = LossReduction::sum;
  const Tensor of_weight = for_each_chunk_of_logits(
      kName, flat.layer, wanted, grad_x, grad_bias,
      [&, &state = state](ChunkLogits& logits, const LayerGradients& gradients, const Rows& chunk) {
        RowState kept = row_state(state, rows, reduction, chunk.begin);
        kept.divisor = nullptr;  // the divisor is known only after the last chunk
        const Tensor target = chunk.of(flat.target);
        is_whole = chunk.count == rows;
        run_forward(kName, logits.compute(chunk), target, sum, chunk.of(losses), kept,
                    is_whole && !each ? &total : nullptr);
        if (!gradients.any()) return;
        gradients.add(logits.layer(), chunk,
                      logits.differentiate(kName, inverse_temperature, target, sum, kept));
      });
  if (wanted[1]) grad_weight = of_weight;
  if (each) {
    loss.copy_(losses.view(loss.sizes()));
  } else if (!is_whole) {
    run_sum(kName, flat.layer.x, total);
  }
  return outputs;
}

Three backward_outputs(const Call& call, const Tensor& grad, const Tensor& state, Wanted wanted) {
  constexpr const char* kBackward = "linear_cross_entropy_backward";
  check(kBackward, call);
  check_tensors(kBackward, {{"x", call.layer.x}, {"grad", grad}, {"state", state}});
  check_dtype(kBackward, "grad", grad);
  check_same_shape(kBackward, "grad", grad, "target", call.target);
  check_vector(kBackward, "state", state, call.rows() * 3, "the numbers of each row");
  return empty_gradients(call.layer, wanted);
}

Three backward(const Call& call, const Tensor& grad, const Tensor& state, Wanted wanted) {
  const int64_t rows = call.target.numel();
  Three outputs = backward_outputs(call, grad, state, rows == 0 ? wanted : without_weight(wanted));
  auto& [grad_x, grad_weight, grad_bias] = outputs;
  if (rows == 0) {
    for (const Tensor& each : {grad_x, grad_weight, grad_bias}) each.zero_();
    return outputs;
  }
  const Call flat = in_rows(call);
  const double temperature = call.layer.temperature;
  Tensor grads = grad.reshape({-1});
  if (temperature != 1) grads = grads.to(state.scalar_type()) / temperature;
  const int64_t all_classes = flat.layer.weight.size(0);
  const Tensor of_weight = for_each_part_of_logits(
      kName, flat.layer, wanted, grad_x, grad_bias,
      [&](ChunkLogits& logits, const Rows& chunk, const Classes& classes) {
        logits.compute(chunk);
        const RowState kept = row_state(state, rows, flat.loss.reduction, chunk.begin);
        return logits.differentiate(kName, chunk.of(grads), chunk.of(flat.target),
                                    part_of(flat.loss, classes, all_classes), kept);
      });
  if (wanted[1]) grad_weight = of_weight;
  return outputs;
}

}  // namespace torchkiln::linear_cross_entropy_ops
