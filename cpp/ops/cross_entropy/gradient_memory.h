#pragma once

// The loss of all rows, with the logits of some classes in the memory of the gradient of the
// weight. A class takes `rows` elements of logits, and `features` elements of the gradient:
//
//   classes                 |          first          |   second   | third |
//   memory of the gradient  | logits of `second`      | of `third` |
//   its own memory          | logits of `first` |
//
// Once all logits are computed and differentiated, the gradients of the weights of `third`,
// `second` and `first` are written in this order, each to its own place: the product before it has
// read the logits there. With twice as many rows as features, 4/7 of the logits have memory of
// their own; with equally many, 1/3.

#include <optional>

#include "cross_entropy/class_chunks.h"

namespace torchkiln {

/// The first, second and third part of the classes.
using ClassParts = std::array<Classes, 3>;

/// The parts; nullopt if chunks of rows take about as little memory. On a GPU also nullopt below 1
/// GiB, because the launches of join_parts() then take too long compared with the products.
inline std::optional<ClassParts> parts_in_gradient(const LogitLayer& layer,
                                                   const LossOptions& options,
                                                   const Wanted& wanted) {
  constexpr int64_t kTile = 128, kLeastBytes = int64_t{1} << 30, kLeastBytesOnCpu = 16 << 20;
  const int64_t rows = layer.x.size(0), features = layer.x.size(1);
  const int64_t classes = layer.weight.size(0);
  const at::ScalarType dtype = layer.x.scalar_type();
  const bool has_options = layer.softcap || options.accuracy;
  if (!wanted[1] || has_options || options.reduction == LossReduction::none ||
      weight_gradient_dtype(dtype) != dtype || rows > kMostRowsOfChunk || features == 0 ||
      classes % 8 != 0)
    return std::nullopt;
  const double ratio = static_cast<double>(rows) / static_cast<double>(features);
  const double share = 1 / (1 + ratio + ratio * ratio);
  const auto third = static_cast<int64_t>(static_cast<double>(classes) * share) / kTile * kTile;
  const int64_t least = (rows * third + features - 1) / features;
  const int64_t second = (least + kTile - 1) / kTile * kTile, first = classes - second - third;
  if (third == 0 || features * first < rows * second) return std::nullopt;
  const ClassParts parts{Classes{0, first}, Classes{first, second}, Classes{first + second, third}};
  if (!has_exact_gradient(parts[2].of(layer.weight))) return std::nullopt;
  const auto bytes = static_cast<int64_t>(layer.x.element_size());
  const int64_t wide = static_cast<int64_t>(c10::elementSize(compute_dtype(dtype))) - bytes;
  const int64_t chunk = rows_per_chunk(layer, dtype == at::kBFloat16);
  const int64_t sum = chunk < rows ? classes * features * wide : 0;
  const int64_t others = chunk * classes * bytes + sum;
  const int64_t own = rows * first * bytes + (wide > 0 ? layer.x.numel() * (bytes + wide) : 0);
  const bool is_large = others >= (layer.x.is_cuda() ? kLeastBytes : kLeastBytesOnCpu);
  return is_large && own * 4 <= others * 3 ? std::optional(parts) : std::nullopt;
}

/// Merges the numbers of parts of the classes, [parts, 5, rows], into the losses and the state of
/// whole rows. The numbers are those of a shard: maximum, sum, sum of q * (logits - maximum), sum
/// of q, weight.
inline void join_parts(const at::Tensor& numbers, const at::Tensor& ignored, double z_loss,
                       const at::Tensor& losses, const at::Tensor& state) {
  const int64_t rows = losses.size(0);
  const auto number = [&](int64_t i) { return numbers.select(1, i); };
  const at::Tensor is_empty = number(1).eq(0);  // all logits of a part are -infinity
  const at::Tensor maximum =
      number(0).masked_fill(is_empty, -std::numeric_limits<double>::infinity()).amax(0);
  const at::Tensor distance = (number(0) - maximum).masked_fill(is_empty, 0);
  const at::Tensor log_sum = (number(1) * distance.exp()).sum(0).log();
  const at::Tensor log_sum_exp = maximum + log_sum;
  const at::Tensor weight = number(4).sum(0).masked_fill(ignored, 0);
  at::Tensor loss = (number(3) * (log_sum - distance) - number(2)).sum(0);
  at::Tensor mass = number(3).sum(0);
  if (z_loss != 0) {
    loss = loss + z_loss * weight * log_sum_exp.square();
    mass = mass + 2 * z_loss * weight * log_sum_exp;
  }
  // Corrects the mass for the rounding of log_sum_exp, which the kernel subtracts.
  const at::Tensor rounding = (maximum - log_sum_exp) + log_sum;
  const at::Tensor factor = at::where(rounding.isfinite(), rounding.neg().exp(), 1);
  losses.copy_(loss.masked_fill(ignored, 0));
  state.narrow(0, 0, rows).copy_(log_sum_exp);
  state.narrow(0, rows, rows).copy_((mass * factor).masked_fill(ignored, 0));
  state.narrow(0, 2 * rows, rows).copy_(weight);
}

/// Computes losses and state, and the gradients of the sum of the losses. Returns the gradient of
/// the weight. `grad` is the incoming gradient, divided by the temperature.
inline at::Tensor forward_in_gradient(const char* op, const LogitLayer& layer,
                                      const at::Tensor& target, const LossOptions& options,
                                      const ClassParts& parts, const Wanted& wanted,
                                      const at::Tensor& grad, const at::Tensor& losses,
                                      const at::Tensor& state, const at::Tensor& grad_x,
                                      const at::Tensor& grad_bias) {
  trace::note("logits of ", parts[0].count,
              " classes in memory of their own, of the others in that of the gradient");
  const Rows rows{0, layer.x.size(0)};
  const int64_t classes = layer.weight.size(0), features = layer.x.size(1);
  ClassGradients gradients(layer, wanted, grad_x, grad_bias);
  const at::Tensor memory = gradients.weight().view({-1});
  LossOptions sum = options;
  sum.reduction = LossReduction::sum;
  const at::Tensor numbers = at::empty({3, 5, rows.count}, losses.options());
  std::array<std::optional<ChunkLogits>, 3> logits;
  for (size_t i = 0; i < parts.size(); ++i) {
    at::Tensor place;  // memory of the previous part
    if (i > 0) {
      place = memory.narrow(0, parts[i - 1].begin * features, rows.count * parts[i].count)
                  .view({rows.count, parts[i].count});
    }
    logits[i].emplace(op, part_of(layer, parts[i]), rows.count, place);
    LossOptions part = part_of(sum, parts[i], classes);
    part.z_loss = 0;
    part.accuracy = false;
    const at::Tensor own = numbers.select(0, static_cast<int64_t>(i));
    const auto at = [&](int64_t k) { return own.select(0, k).data_ptr(); };
    const RowState kept{at(0), at(3), at(4), nullptr, nullptr, at(1)};
    run_forward(op, logits[i]->compute(rows), target, part, own.select(0, 2), kept);
  }
  join_parts(numbers, target.eq(sum.ignore_index), sum.z_loss, losses, state);
  RowState kept = row_state(state, rows.count, options.reduction);
  kept.divisor = nullptr;  // the divisor is known only after all rows
  for (size_t i = parts.size(); i-- > 0;) {
    const at::Tensor of_logits =
        logits[i]->differentiate(op, grad, target, part_of(sum, parts[i], classes), kept);
    gradients.add(*logits[i], of_logits, parts[i]);
  }
  return gradients.finish();
}

}  // namespace torchkiln
