#include "cross_entropy_target.cuh"
#include "torchkiln/exponentials.cuh"
#include "torchkiln/sums.cuh"

namespace torchkiln::cuda {
namespace {

constexpr int kLossThreads = 256;
// Of a multiprocessor, with 64 registers each.
constexpr int kResidentThreads = 1024;
template <bool kSpread>
inline constexpr int kLossItems = kSpread ? 2 : 4;

/// Teams that take one row after another, with the next vectors of each thread on the way, of this
/// row or of the next, while it computes with these. Each thread keeps the largest logit that it
/// has seen and the sum of exponentials relative to that. kSpread: q does not vanish outside of the
/// target class.
template <class Access, bool kSpread>
__global__ void __launch_bounds__(kLossThreads, kResidentThreads / kLossThreads)
    cross_entropy_rows(CrossEntropy p, TeamShape shape) {
  using T = typename Access::T;
  using C = Compute<T>;
  using Powers = PowersFor<T>;
  using Sums = AddPowers<Powers>;
  using Item = typename Access::Item;
  constexpr int kLanes = Access::kLanes;
  constexpr int kItems = kLossItems<kSpread>;
  constexpr int kValues = kSpread ? 4 : 2;
  __shared__ Meeting<C, kValues> meeting;
  wait_for_previous_kernel();
  Team<C, kValues> team(shape, meeting);
  const int step = kItems * team.size();
  const auto logits_of = [&](int64_t row) {
    return static_cast<const T*>(p.logits) + row * p.row_stride;
  };
  const auto access_of = [&](int64_t row) {
    return Access(logits_of(row), row < p.rows ? static_cast<int>(p.classes) : 0);
  };
  const auto load = [&](const T* logits, const Access& access, int first, Item(&to)[kItems]) {
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      const int vector = first + k * team.size();
      fill(to[k], T(-INFINITY));
      if (vector < access.vectors())
        to[k] = access.load(logits, access.column(vector), T(-INFINITY));
    }
  };
  // What one thread of the team needs to know, all of them where q is spread.
  const auto target_at = [&](int64_t row) {
    const bool wanted = row < p.rows && (kSpread || team.rank() == 0);
    return wanted ? target_of<C>(p.target, row, p.classes) : RowTarget<C>{};
  };
  const auto is_ignored = [&](const RowTarget<C>& target) {
    return p.target.index != nullptr && target.index == p.target.ignore_index;
  };
  const auto logit_at = [&](int64_t row, const RowTarget<C>& target) {
    const bool wanted = !kSpread && row < p.rows && team.rank() == 0 && !is_ignored(target);
    return wanted ? convert<C>(logits_of(row)[target.index]) : C(0);
  };

  int64_t first_row = team.first();
  int64_t row = first_row + team.index();
  Access access = access_of(row);
  Item items[kItems];
  load(logits_of(row), access, team.rank(), items);
  team.open();
  RowTarget<C> target = target_at(row);
  C logit = logit_at(row, target);

  for (; first_row < p.rows; first_row += team.teams()) {
    const bool inside = row < p.rows;
    const int64_t next_row = row + team.teams();
    const RowTarget<C> next_target = target_at(next_row);
    const Distribution<Access, C> distribution(p.target, row, p.classes, target.index);
    // Sums of q * logits are taken relative to one of them, so that a large offset costs no digits.
    C base = 0;
    if (kSpread) {
      base = inside ? convert<C>(logits_of(row)[0]) : C(0);
      if (!isfinite(base)) base = 0;
    }

    // The largest exponent, the sum of powers relative to that, of q * (logits - base), of q.
    constexpr C kUnit = static_cast<C>(Powers::kUnit);
    C values[kValues] = {};
    values[0] = -C(INFINITY);
    const int vectors = access.vectors();
    const Access next_access = access_of(next_row);
    int first = team.rank();
    bool is_last;
    do {
      is_last = first + step >= vectors;
      Item next[kItems];
      load(logits_of(is_last ? next_row : row), is_last ? next_access : access,
           is_last ? team.rank() : first + step, next);
      const C largest = fmax(values[0], largest_of<C>(items) * kUnit);
      const C reference = Sums::reference(largest);
      // A group's sums first: the rounding error grows with the number of groups.
      C part = 0, part_of_logits = 0, part_of_q = 0;
#pragma unroll
      for (int k = 0; k < kItems; ++k) {
        C z[kLanes];
        widen(items[k], z);
#pragma unroll
        for (int i = 0; i < kLanes; ++i) part += Powers::power(z[i] * kUnit - reference);
        if constexpr (kSpread) {
          const int column = access.column(first + k * team.size());
          if (column >= access.columns) continue;
          C q[kLanes];
          distribution.load(access, column, q);
#pragma unroll
          for (int i = 0; i < kLanes; ++i) {
            if (!access.has(column, i)) continue;
            part_of_logits += q[i] * (z[i] - base);
            part_of_q += q[i];
          }
        }
      }
      if constexpr (kSpread) {
        values[2] += part_of_logits;
        values[3] += part_of_q;
      }
      if (values[0] != -C(INFINITY)) part += values[1] * Powers::power(values[0] - reference);
      values[1] = part;
      values[0] = largest;
#pragma unroll
      for (int k = 0; k < kItems; ++k) items[k] = next[k];
      first += step;
    } while (!is_last);
    // A warp's threads agree upon the largest first, which leaves one power for each of them.
    C largest[1] = {values[0]};
    team.combine_in_warp(largest, Largest{});
    values[1] = Sums::rescaled(values[1], values[0], largest[0]);
    values[0] = 0;
    team.combine_in_warp(values, Add{});
    values[0] = largest[0];
    team.combine_warps(values, Sums{});
    if (inside && team.rank() == 0) {
      // The exponent as a number of the logits' kind, and what was lost when that was rounded.
      const double exact = static_cast<double>(Sums::reference(values[0])) * Powers::kNatural;
      const C reference = static_cast<C>(exact);
      const C log_sum = log(values[1]) + static_cast<C>(exact - static_cast<double>(reference));
      const C log_sum_exp = reference + log_sum;
      const C rest = (reference - log_sum_exp) + log_sum;
      C mass, loss;
      if constexpr (kSpread) {
        mass = values[3];
        loss = mass * ((reference - base) + log_sum) - values[2];
      } else {
        mass = target.weight;
        loss = mass * ((reference - logit) + log_sum);
      }
      const C z_loss = static_cast<C>(p.z_loss) * target.weight;
      if (z_loss != C(0)) {
        loss += z_loss * log_sum_exp * log_sum_exp;
        mass += C(2) * z_loss * log_sum_exp;
      }
      mass *= rest == rest ? exp(-rest) : C(1);
      static_cast<C*>(p.loss)[row] = is_ignored(target) ? C(0) : loss;
      static_cast<C*>(p.log_sum_exp)[row] = log_sum_exp;
      static_cast<C*>(p.mass)[row] = is_ignored(target) ? C(0) : mass;
      static_cast<C*>(p.target_weight)[row] = target.weight;
    }
    row = next_row;
    access = next_access;
    logit = logit_at(row, next_target);
    target = next_target;
  }
}

constexpr int kSumThreads = 1024;

/// One block adds the losses of all rows, and their weights.
template <class C>
__global__ void __launch_bounds__(kSumThreads) sum_losses(LossSum p) {
  __shared__ Meeting<double, 2> meeting;
  wait_for_previous_kernel();
  Team<double, 2> team({kSumThreads, 31, 0, 1}, meeting);
  const C* losses = static_cast<const C*>(p.loss);
  const C* weights = static_cast<const C*>(p.target_weight);
  double sums[2] = {};
#pragma unroll 8
  for (int64_t row = threadIdx.x; row < p.rows; row += kSumThreads) {
    sums[0] += static_cast<double>(losses[row]);
    if (p.mean) sums[1] += static_cast<double>(weights[row]);
  }
  team.combine(sums, Add{});
  if (threadIdx.x > 0) return;
  Result{p.out, p.out_dtype, 1}.store(0, p.mean ? sums[0] / sums[1] : sums[0]);
  if (p.mean) *static_cast<C*>(p.divisor) = static_cast<C>(sums[1]);
}

}  // namespace

Status cross_entropy(const CrossEntropy& p, CUstream_st* stream) {
  if (p.rows == 0 || p.classes == 0) return {};
  if (p.classes > kMostColumns) return {kTooLong};
  const RowsOf tensors[] = {{p.logits, p.row_stride},
                            {p.target.probabilities, p.target.probabilities_row_stride}};
  return dispatch_floating(p.dtype, [&](auto tag) {
    using T = typename std::decay_t<decltype(tag)>::type;
    return with_access<T>(kind_of(tensors, p.dtype, p.rows, p.classes), [&](auto access) {
      using Access = typename std::decay_t<decltype(access)>::type;
      const int64_t vectors = ceil_div(p.classes, Access::kLanes) + (Access::kWhole ? 0 : 1);
      const bool spread = is_spread(p.target);
      const int items = spread ? kLossItems<true> : kLossItems<false>;
      const int64_t threads = ceil_div(vectors, items);
      const Device device = current_device();
      TeamShape team = team_of(threads, kLossThreads, threads <= kWarpLanes ? 128 : 0, 1);
      // Long rows that are too few for all multiprocessors are shared by the blocks of a cluster.
      while (device.runs_90_code && team.threads == kLossThreads &&
             team.blocks() < kMostClusterBlocks &&
             p.rows * team.blocks() < 2 * device.multiprocessors && threads > 2 * team.size()) {
        ++team.log_blocks;
      }
      const int64_t resident =
          int64_t{device.multiprocessors} * (kResidentThreads / team.block_threads());
      const int64_t rows =
          std::min(p.rows, std::max<int64_t>(resident >> team.log_blocks, 1) * team.per_block);
      Grid grid;
      const Status status = make_grid(team, rows, grid);
      if (!status.ok()) return status;
      return spread ? launch_overlapped(cross_entropy_rows<Access, true>, grid, stream, p, team)
                    : launch_overlapped(cross_entropy_rows<Access, false>, grid, stream, p, team);
    });
  });
}

Status loss_sum(const LossSum& p, CUstream_st* stream) {
  const Grid grid{dim3(1), dim3(kSumThreads)};
  if (p.dtype == Dtype::float64) return launch_overlapped(sum_losses<double>, grid, stream, p);
  return launch_overlapped(sum_losses<float>, grid, stream, p);
}

}  // namespace torchkiln::cuda
