#include "detail/reduce/common.cuh"
#include "detail/rowwise/online_softmax.cuh"
#include "target.cuh"

namespace torchkiln::cuda {

using namespace reduce;
namespace {

// One block per row: only its own loads in flight hide latency.
constexpr int kLossThreads = 256;
constexpr int kSpreadItems = 2;
constexpr int kLongItems = 4;
constexpr int kShortItems = 8;

/// A team reads a row once; each thread has the loads of its next kItems vectors in flight while it
/// computes with the current ones. Each thread keeps a running maximum and the sum of exponentials
/// relative to it. kSpread: q is not 0 outside of the target class. kOnce: kItems vectors per
/// thread hold the whole row.
template <class Access, bool kSpread, int kItems, bool kOnce>
__global__ void __launch_bounds__(kLossThreads, 4)
    cross_entropy_rows(CrossEntropy p, TeamShape shape) {
  using T = typename Access::T;
  using C = Compute<T>;
  using Math = MathFor<T>;
  using Sums = SumOfExponentials<Math>;
  using Item = typename Access::Item;
  constexpr int kLanes = Access::kLanes;
  constexpr int kValues = kSpread ? 4 : 2;
  __shared__ TeamStorage<C, kValues> storage;
  wait_for_previous_kernel();
  Team<C, kValues> team(shape, storage);
  const int64_t row = team.first_team() + team.index();
  const bool inside = row < p.rows;
  const T* logits = static_cast<const T*>(p.logits) + row * p.row_stride;
  const Access access(logits, inside ? static_cast<int>(p.classes) : 0);
  const int vectors = access.vectors();
  const int step = kItems * team.size();
  const bool can_overread = Access::can_overread(row, p.rows, p.row_stride);
  const auto load = [&](int first, Item(&to)[kItems]) {
    access.load(logits, access.column(first), team.size() * kLanes, to, T(-INFINITY), can_overread);
  };
  // The first vectors are requested before the loads that depend on the target.
  Item items[kItems];
  load(team.rank(), items);
  team.init_barriers();
  RowTarget<C> target{};
  if (inside && (kSpread || team.rank() == 0)) target = target_of<C>(p.target, row, p.classes);
  const bool has_class = target.index >= 0;
  const Distribution<Access, C> distribution(p.target, row, target.index);
  // Sums of q * logits are relative to the first logit, so that a large offset costs no digits.
  C base = 0, logit = 0;
  if (kSpread) {
    base = inside ? convert<C>(logits[0]) : C(0);
    if (!isfinite(base)) base = 0;
  } else if (inside && team.rank() == 0 && has_class) {
    logit = convert<C>(logits[target.index]);
  }

  // {maximum, sum of exp(logit - maximum), sum of q * (logit - base), sum of q}
  C values[kValues] = {};
  values[0] = -C(INFINITY);
  const auto accumulate = [&](int first) {
    const C largest = fmax(values[0], max_of<C>(items));
    const C reference = Sums::reference(largest);
    // Groups are summed first: the rounding error grows with the number of groups.
    C group_sum = 0, group_logits = 0, group_q = 0;
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      if (kOnce && team.rank() + k * team.size() >= vectors) break;
      C z[kLanes];
      widen(items[k], z);
#pragma unroll
      for (int i = 0; i < kLanes; ++i) group_sum += Math::exp(z[i] - reference);
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
    if constexpr (kSpread) {
      values[2] += group_logits;
      values[3] += group_q;
    }
    if (values[0] != -C(INFINITY)) group_sum += values[1] * Math::exp(values[0] - reference);
    values[1] = group_sum;
    values[0] = largest;
  };
  if constexpr (kOnce) {
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
  // The threads of a warp first reduce the maximum, which leaves one exponential per thread for the
  // rescaling.
  C largest[1] = {values[0]};
  team.reduce_in_warp(largest, Max{});
  values[1] = Sums::rescaled(values[1], values[0], largest[0]);
  values[0] = 0;
  team.reduce_in_warp(values, Sum{});
  values[0] = largest[0];
  team.reduce_warps(values, Sums{});
  if (!inside || team.rank() > 0) return;

  const C reference = Sums::reference(values[0]);
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
    return;
  }
  const C log_sum = log(values[1]);
  const C log_sum_exp = reference + log_sum;
  // The rounding error of log_sum_exp.
  const C rounding = (reference - log_sum_exp) + log_sum;
  C mass, loss;
  if constexpr (kSpread) {
    mass = values[3];
    loss = mass * ((reference - base) + log_sum) - values[2];
    // An infinite probability, whose product with a distance of 0 is NaN.
    if (isinf(mass) && log_sum > C(0)) loss = mass;
    // With label_smoothing 1 the target's own share is 0, which makes an overflow NaN.
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
  static_cast<C*>(p.loss)[row] = target.ignored ? C(0) : loss;
  static_cast<C*>(p.log_sum_exp)[row] = log_sum_exp;
  static_cast<C*>(p.mass)[row] = target.ignored ? C(0) : mass;
  static_cast<C*>(p.target_weight)[row] = target.weight;
  if (p.correct == nullptr) return;
  const bool correct = has_class && convert<C>(logits[target.index]) >= values[0];
  static_cast<C*>(p.correct)[row] = correct ? C(1) : C(0);
}

constexpr int kSumThreads = 1024;
constexpr TeamShape kSumBlock{kSumThreads, 31, 0, 1};
constexpr TeamShape kSumCluster{kMaxTeamThreads, 31, 3, 1};
constexpr int64_t kFewestRowsOfCluster = 16384;

/// One team, a block or a cluster, adds the losses and the weights of all rows.
template <class C>
__global__ void __launch_bounds__(kSumThreads) sum_losses(LossSum p, TeamShape shape) {
  __shared__ TeamStorage<double, 2> storage;
  wait_for_previous_kernel();
  Team<double, 2> team(shape, storage);
  team.init_barriers();
  const C* losses = static_cast<const C*>(p.loss);
  const C* weights = static_cast<const C*>(p.target_weight);
  double sums[2] = {};
  const auto add = [&](double& sum, const C* values) {
    constexpr int kLanes = kVectorLanes<C>;
    const int64_t vectors = aligned(values) ? p.rows / kLanes : 0;
#pragma unroll 8
    for (int64_t at = team.rank(); at < vectors; at += team.size()) {
      const Vec<C, kLanes> vector = load_vector<kLanes>(values + at * kLanes);
#pragma unroll
      for (int i = 0; i < kLanes; ++i) sum += static_cast<double>(vector.lane[i]);
    }
#pragma unroll 8
    for (int64_t row = vectors * kLanes + team.rank(); row < p.rows; row += team.size())
      sum += static_cast<double>(values[row]);
  };
  add(sums[0], losses);
  if (p.mean) add(sums[1], weights);
  team.reduce(sums, Sum{});
  if (team.rank() > 0) return;
  Result{p.out, p.out_dtype, 1}.store(0, p.mean ? sums[0] / sums[1] : sums[0]);
  if (p.mean) *static_cast<C*>(p.divisor) = static_cast<C>(sums[1]);
}

}  // namespace

Status cross_entropy(const CrossEntropy& given, CUstream_st* stream) {
  const CrossEntropy p = with_all_classes(given);
  if (p.rows == 0 || p.classes == 0) return {};
  if (p.classes > kMaxColumns) return {kTooLong};
  const TensorRows tensors[] = {{p.logits, p.row_stride}, probability_rows(p.target, p.dtype)};
  const Alignment alignment = with_probabilities(alignment_of(tensors, p.dtype, p.rows, p.classes),
                                                 p.target, p.dtype, p.classes);
  return dispatch_floating(p.dtype, [&](auto tag) {
    using T = typename std::decay_t<decltype(tag)>::type;
    return with_vectors<T>(alignment, [&](auto access) {
      using Access = typename std::decay_t<decltype(access)>::type;
      const int64_t vectors = ceil_div(p.classes, Access::kLanes) + (Access::kAligned ? 0 : 1);
      const int64_t threads = ceil_div(vectors, kShortItems);
      const Device device = current_device();
      TeamShape team = make_team(threads, kLossThreads, threads <= kWarpLanes ? 128 : 0, 1);
      // Long rows, too few to occupy every SM, are shared by the blocks of a cluster.
      while (device.runs_90_code && team.threads == kLossThreads &&
             team.blocks() < kMaxClusterBlocks &&
             p.rows * team.blocks() < 2 * device.multiprocessors && threads > 2 * team.size()) {
        ++team.log_blocks;
      }
      Grid grid;
      const Status status = make_grid(team, p.rows, grid);
      if (!status.ok()) return status;
      const auto launch_rows = [&](auto spread, auto items, auto once) {
        return launch_overlapped(cross_entropy_rows<Access, spread, items, once>, grid, stream, p,
                                 team);
      };
      using SpreadItems = std::integral_constant<int, kSpreadItems>;
      using LongItems = std::integral_constant<int, kLongItems>;
      using ShortItems = std::integral_constant<int, kShortItems>;
      if (is_spread(p.target))
        return launch_rows(std::true_type{}, SpreadItems{}, std::false_type{});
      if (vectors <= int64_t{kShortItems} * team.size())
        return launch_rows(std::false_type{}, ShortItems{}, std::true_type{});
      return launch_rows(std::false_type{}, LongItems{}, std::false_type{});
    });
  });
}

Status loss_sum(const LossSum& p, CUstream_st* stream) {
  const bool uses_cluster = current_device().runs_90_code && p.rows >= kFewestRowsOfCluster;
  const TeamShape team = uses_cluster ? kSumCluster : kSumBlock;
  Grid grid;
  const Status status = make_grid(team, 1, grid);
  if (!status.ok()) return status;
  return p.dtype == Dtype::float64 ? launch_overlapped(sum_losses<double>, grid, stream, p, team)
                                   : launch_overlapped(sum_losses<float>, grid, stream, p, team);
}

}  // namespace torchkiln::cuda
