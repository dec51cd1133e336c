#pragma once

// The loss of a row and the state that its gradient needs.

#include "detail/rowwise/online_softmax.cuh"
#include "detail/rowwise/tile.cuh"
#include "target.cuh"

namespace torchkiln::cuda {
namespace {

/// Values that a team reduces: {maximum, sum of exp(logit - maximum)}. If q is spread over classes,
/// also {sum of q * (logit - base), sum of q}; for a log-probability, also the sum of exp(logit -
/// maximum) * (logit - maximum).
template <RowForm kForm>
inline constexpr int kLossValues = kForm == RowForm::spread    ? 4
                                   : kForm == RowForm::logprob ? 3
                                                               : 2;

/// Operator over {maximum, sum of exp(z - maximum), sum of exp(z - maximum) * (z - maximum)}.
template <class Math>
struct SumOfEntropies : SumOfExponentials<Math> {
  using Base = SumOfExponentials<Math>;

  /// Converts both sums from exponents relative to `from` to exponents relative to `to`.
  template <class C>
  static __device__ __forceinline__ void rescale(C& sum, C& moment, C from, C to) {
    if (from == to || from == -C(INFINITY)) return;
    const C shift = from - Base::reference(to);
    const C factor = Math::exp(shift);
    moment = factor * (moment + fmax(shift, kLeastExponent<C>) * sum);
    sum *= factor;
  }
  template <class C>
  __device__ __forceinline__ void operator()(C (&a)[3], const C (&b)[3]) const {
    const C largest = fmax(a[0], b[0]);
    C sum = b[1], moment = b[2];
    rescale(sum, moment, b[0], largest);
    rescale(a[1], a[2], a[0], largest);
    a[0] = largest;
    a[1] += sum;
    a[2] += moment;
  }
};

template <class C>
struct RowLoss {
  C loss = 0;
  C weight = 0;  // weight of the target
};

/// Stores loss, log-sum-exp, mass and weight of a row. `values`: see kLossValues; `logit`: the
/// logit of the target class, unless q is spread.
template <RowForm kForm, class T, class C>
__device__ __forceinline__ RowLoss<C> finish_row(const CrossEntropy& p, int64_t row,
                                                 const T* logits, const RowTarget<C>& target,
                                                 C base, C logit,
                                                 const C (&values)[kLossValues<kForm>]) {
  constexpr bool kSpread = kForm == RowForm::spread, kLogprob = kForm == RowForm::logprob;
  const bool has_class = target.index >= 0;
  const C reference = SumOfExponentials<MathFor<T>>::reference(values[0]);
  if (p.sum != nullptr) {  // a shard
    C mass = target.weight;
    C below = has_class ? mass * (logit - reference) : C(0);
    if constexpr (kSpread) {
      mass = values[3];
      below = values[2] - mass * (reference - base);
    }
    static_cast<C*>(p.loss)[row] = below;
    static_cast<C*>(p.log_sum_exp)[row] = reference;
    static_cast<C*>(p.sum)[row] = values[1];
    static_cast<C*>(p.mass)[row] = mass;
    static_cast<C*>(p.target_weight)[row] = target.weight;
    if constexpr (kLogprob) {
      if (p.entropy != nullptr) static_cast<C*>(p.entropy)[row] = values[2];
    }
    return {};
  }
  const C log_sum = log(values[1]);
  const C log_sum_exp = reference + log_sum;
  // The part of the log-sum-exp that the rounding above cut off.
  const C rounding = (reference - log_sum_exp) + log_sum;
  C mass, loss;
  if constexpr (kSpread) {
    mass = values[3];
    loss = mass * ((reference - base) + log_sum) - values[2];
    // An infinite probability times a distance of 0 made the loss NaN; the true loss is infinite.
    if (isinf(mass) && log_sum > C(0)) loss = mass;
    // With label_smoothing 1 the target class has the factor 0. 0 times an infinite distance makes
    // the loss NaN, as in torch.
    if (p.target.label_smoothing == 1 && has_class)
      loss += C(0) * (log_sum_exp - convert<C>(logits[target.index]));
  } else {
    mass = target.weight;
    loss = mass * ((reference - logit) + log_sum);
  }
  const C z_loss = static_cast<C>(p.z_loss) * target.weight;
  if (z_loss != C(0)) {
    loss += z_loss * log_sum_exp * log_sum_exp;
    mass += C(2) * z_loss * log_sum_exp;
  }
  mass *= rounding == rounding ? exp(-rounding) : C(1);
  if (target.ignored) loss = mass = C(0);
  if constexpr (kLogprob) {
    loss = -loss;
    const C entropy = target.ignored ? C(0) : log_sum - values[2] / values[1];
    if (p.entropy != nullptr) static_cast<C*>(p.entropy)[row] = entropy;
  }
  static_cast<C*>(p.loss)[row] = loss;
  static_cast<C*>(p.log_sum_exp)[row] = log_sum_exp;
  static_cast<C*>(p.mass)[row] = mass;
  static_cast<C*>(p.target_weight)[row] = target.weight;
  if (p.correct == nullptr) return {loss, target.weight};
  const bool correct = has_class && convert<C>(logits[target.index]) >= values[0];
  static_cast<C*>(p.correct)[row] = correct ? C(1) : C(0);
  return {loss, target.weight};
}

/// Reads the row of a team once. Each thread keeps a running maximum and the sum of exponentials
/// relative to it. All threads of the block must call it once; only the first thread of a team gets
/// the loss.
template <class Access, RowForm kForm, int kItems, RowPass kPass, class LossTeam,
          class C = Compute<typename Access::T>>
__device__ __forceinline__ RowLoss<C> loss_of_row(const CrossEntropy& p, LossTeam& team,
                                                  int64_t row) {
  using T = typename Access::T;
  using Math = MathFor<T>;
  constexpr bool kSpread = kForm == RowForm::spread, kLogprob = kForm == RowForm::logprob;
  using Sums = std::conditional_t<kLogprob, SumOfEntropies<Math>, SumOfExponentials<Math>>;
  using Item = typename Access::Item;
  constexpr int kLanes = Access::kLanes;
  const bool inside = row < p.rows;
  const T* logits = static_cast<const T*>(p.logits) + row * p.row_stride;
  const Access access(logits, inside ? static_cast<int>(p.classes) : 0);
  using Tile = UnalignedRowTile<T, kItems>;
  constexpr bool kInner = kPass == RowPass::inner;
  const int vectors =
      kInner ? static_cast<int>(Tile::inner_vectors(access.columns)) : access.vectors();
  const int step = kItems * team.size();
  const bool can_overread = Access::can_overread(row, p.rows, p.row_stride);
  const auto load = [&](int first, Item(&to)[kItems]) {
    access.load(logits, access.column(first), team.size() * kLanes, to, T(-INFINITY), can_overread);
  };
  // The first vectors are requested before the loads that depend on the target.
  Item items[kItems];
  C edge = -C(INFINITY);
  if constexpr (kInner) {
    const Tile tile(logits, access.columns, team.rank(), team.size());
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      fill(items[k], T(-INFINITY));
      if (tile.has_any(k)) items[k] = load_vector<kLanes>(logits + tile.column(k));
    }
    if (tile.has_any(kItems)) edge = convert<C>(logits[tile.column(kItems)]);
  } else {
    load(team.rank(), items);
  }
  team.init_barriers();
  RowTarget<C> target{};
  if (inside && (kSpread || team.rank() == 0)) target = target_of<C>(p.target, row, p.classes);
  const bool has_class = target.index >= 0;
  const Distribution<Access, C> distribution(p.target, row, target.index);
  const C scale = static_cast<C>(p.scale);
  // Sums of q * logits are relative to the first logit, so that a large offset costs no digits.
  C base = 0, logit = 0;
  if (kSpread) {
    base = inside ? convert<C>(logits[0]) : C(0);
    if (!isfinite(base)) base = 0;
  } else if (inside && team.rank() == 0 && has_class) {
    logit = convert<C>(logits[target.index]);
    if constexpr (kLogprob) logit = rounded_product(logit, scale);
  }

  C values[kLossValues<kForm>] = {};
  values[0] = -C(INFINITY);
  const auto accumulate = [&](int first) {
    C most = max_of<C>(items);
    if constexpr (kInner) most = fmax(most, edge);
    if constexpr (kLogprob) most = rounded_product(most, scale);
    const C largest = fmax(values[0], most);
    const C reference = Sums::reference(largest);
    // Groups are summed first: the rounding error then grows with the number of groups, not of
    // classes.
    C group_sum = 0, group_logits = 0, group_q = 0, group_moment = 0;
    const auto add = [&](C logit_of_class) {
      if constexpr (kLogprob) {
        const C exponent = rounded_product(logit_of_class, scale) - reference;
        const C power = Math::exp(exponent);
        group_sum += power;
        group_moment += power * fmax(exponent, kLeastExponent<C>);
      } else {
        group_sum += Math::exp(logit_of_class - reference);
      }
    };
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      if (kPass != RowPass::steps && team.rank() + k * team.size() >= vectors) break;
      C z[kLanes];
      widen(items[k], z);
#pragma unroll
      for (int i = 0; i < kLanes; ++i) add(z[i]);
      if constexpr (kSpread) {
        const int column = access.column(first + k * team.size());
        if (column >= access.columns) continue;
        C q[kLanes];
        distribution.load(access, column, q);
#pragma unroll
        for (int i = 0; i < kLanes; ++i) {
          if (!access.has(column, i)) continue;
          group_logits += q[i] * (z[i] - base);
          group_q += q[i];
        }
      }
    }
    if constexpr (kInner) add(edge);
    if constexpr (kSpread) {
      values[2] += group_logits;
      values[3] += group_q;
    }
    if constexpr (kLogprob) {
      Sums::rescale(values[1], values[2], values[0], largest);
      values[2] += group_moment;
      group_sum += values[1];
    } else if (values[0] != -C(INFINITY)) {
      group_sum += values[1] * Math::exp(values[0] - reference);
    }
    values[1] = group_sum;
    values[0] = largest;
  };
  if constexpr (kPass != RowPass::steps) {
    accumulate(team.rank());
  } else {
    for (int first = team.rank(); first < vectors; first += step) {
      Item next[kItems];
      load(first + step, next);
      accumulate(first);
#pragma unroll
      for (int k = 0; k < kItems; ++k) items[k] = next[k];
    }
  }
  // Lanes first reduce the maximum within their warp; then each thread rescales its sums with one
  // exponential.
  C largest[1] = {values[0]};
  team.reduce_in_warp(largest, Max{});
  if constexpr (kLogprob) {
    Sums::rescale(values[1], values[2], values[0], largest[0]);
  } else {
    values[1] = Sums::rescaled(values[1], values[0], largest[0]);
  }
  values[0] = 0;
  team.reduce_in_warp(values, Sum{});
  values[0] = largest[0];
  team.reduce_warps(values, Sums{});
  if (!inside || team.rank() > 0) return {};
  return finish_row<kForm>(p, row, logits, target, base, logit, values);
}

}  // namespace
}  // namespace torchkiln::cuda
