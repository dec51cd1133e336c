#include "torchkiln/kernels/cross_entropy.h"

#include <cstdio>

#include "torchkiln/exponentials.cuh"
#include "torchkiln/math.h"
#include "torchkiln/row.cuh"
#include "torchkiln/sums.cuh"

namespace torchkiln::cuda {
namespace {

/// What the loss needs of the row's target.
template <class C>
struct RowTarget {
  int64_t index = -1;  // of the class; -1 beside probabilities
  C weight = 1;        // of the row; 0 where it is ignored
};

__device__ __noinline__ void stop_at(long long target, long long classes, long long row) {
  printf(
      "torchkiln.cross_entropy: target: got %lld in row %lld, expected 0 to %lld or ignore_index\n",
      target, row, classes - 1);
  __trap();
}

template <class C>
__device__ __forceinline__ RowTarget<C> target_of(const ClassTarget& target, int64_t row,
                                                  int64_t classes) {
  RowTarget<C> found;
  if (target.index == nullptr) return found;
  found.index = target.index[row];
  if (found.index == target.ignore_index) {
    found.weight = 0;
    return found;
  }
  if (static_cast<uint64_t>(found.index) >= static_cast<uint64_t>(classes))
    stop_at(found.index, classes, row);
  if (target.weight != nullptr) found.weight = static_cast<const C*>(target.weight)[found.index];
  return found;
}

/// q of the lanes of a vector of classes, where it does not vanish outside of one class.
template <class Access, class C>
struct Distribution {
  using T = typename Access::T;
  static constexpr int kLanes = Access::kLanes;

  const T* probabilities;  // of the row; null beside a class
  const C* weight;
  int index;
  C rest;   // 1 - label_smoothing
  C share;  // label_smoothing / classes

  __device__ __forceinline__ Distribution(const ClassTarget& target, int64_t row, int64_t classes,
                                          int64_t index_)
      : probabilities(static_cast<const T*>(target.probabilities)),
        weight(static_cast<const C*>(target.weight)),
        index(static_cast<int>(index_)),
        rest(static_cast<C>(1 - target.label_smoothing)),
        share(static_cast<C>(target.label_smoothing / static_cast<double>(classes))) {
    if (probabilities != nullptr) probabilities += row * target.probabilities_row_stride;
  }

  __device__ __forceinline__ void load(const Access& access, int column, C (&q)[kLanes]) const {
    if (probabilities != nullptr) {
      widen(access.load(probabilities, column), q);
    } else {
#pragma unroll
      for (int i = 0; i < kLanes; ++i) q[i] = column + i == index ? C(1) : C(0);
    }
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      if (!access.has(column, i)) continue;
      q[i] = rest * q[i] + share;
      if (weight != nullptr) q[i] *= weight[column + i];
    }
  }
};

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

__device__ __forceinline__ double number(const void* from, Dtype dtype, int64_t at) {
  switch (dtype) {
    case Dtype::float32:
      return static_cast<const float*>(from)[at];
    case Dtype::float64:
      return static_cast<const double*>(from)[at];
    case Dtype::float16:
      return __half2float(static_cast<const __half*>(from)[at]);
    default:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(from)[at]);
  }
}

constexpr int kGradientThreads = 256;
constexpr int kGradientItems = 4;

/// A block writes a part of a row of gradients; what it needs of the whole row, forward has kept.
template <class Access, bool kSpread>
__global__ void __launch_bounds__(kGradientThreads, 4)
    cross_entropy_gradient(CrossEntropyBackward p, int parts, int vectors_of_part) {
  using T = typename Access::T;
  using C = Compute<T>;
  using Math = MathFor<T>;
  using Item = typename Access::Item;
  constexpr int kLanes = Access::kLanes;
  wait_for_previous_kernel();
  const int64_t row = parts == 1 ? blockIdx.x : blockIdx.x / static_cast<unsigned>(parts);
  const int part = static_cast<int>(blockIdx.x - row * parts);
  const T* logits = static_cast<const T*>(p.logits) + row * p.row_stride;
  T* grad_logits = static_cast<T*>(p.grad_logits) + row * p.grad_logits_row_stride;
  const Access access(logits, static_cast<int>(p.classes));
  const int begin = part * vectors_of_part + static_cast<int>(threadIdx.x);
  const int end = min(access.vectors(), (part + 1) * vectors_of_part);
  const int step = static_cast<int>(blockDim.x);
  Item items[kGradientItems];
  const auto load = [&](int first) {
#pragma unroll
    for (int k = 0; k < kGradientItems; ++k) {
      const int vector = first + k * step;
      if (vector < end) items[k] = access.load(logits, access.column(vector));
    }
  };
  load(begin);

  const RowTarget<C> target = target_of<C>(p.target, row, p.classes);
  const bool ignored = p.target.index != nullptr && target.index == p.target.ignore_index;
  C scale = static_cast<C>(number(p.grad, p.grad_dtype, row * p.grad_stride));
  if (p.divisor != nullptr) scale /= *static_cast<const C*>(p.divisor);
  const C log_sum_exp = static_cast<const C*>(p.log_sum_exp)[row];
  const C slope = scale * static_cast<const C*>(p.mass)[row];
  const Distribution<Access, C> distribution(p.target, row, p.classes, target.index);
  for (int first = begin; first < end; first += kGradientItems * step) {
    if (first != begin) load(first);
#pragma unroll
    for (int k = 0; k < kGradientItems; ++k) {
      const int vector = first + k * step;
      if (vector >= end) break;
      const int column = access.column(vector);
      C z[kLanes];
      widen(items[k], z);
#pragma unroll
      for (int i = 0; i < kLanes; ++i) z[i] = slope * Math::exp(z[i] - log_sum_exp);
      if constexpr (kSpread) {
        C q[kLanes];
        distribution.load(access, column, q);
#pragma unroll
        for (int i = 0; i < kLanes; ++i) z[i] -= scale * q[i];
      } else if (static_cast<unsigned>(distribution.index - access.column(vector)) < kLanes) {
#pragma unroll
        for (int i = 0; i < kLanes; ++i)
          if (column + i == distribution.index) z[i] -= scale * target.weight;
      }
      if (ignored) {
#pragma unroll
        for (int i = 0; i < kLanes; ++i) z[i] = 0;
      }
      access.save(grad_logits, column, z);
    }
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

bool is_spread(const ClassTarget& target) {
  return target.index == nullptr || target.label_smoothing != 0;
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

Status cross_entropy_backward(const CrossEntropyBackward& p, CUstream_st* stream) {
  if (p.rows == 0 || p.classes == 0) return {};
  if (p.classes > kMostColumns) return {kTooLong};
  const RowsOf tensors[] = {{p.logits, p.row_stride},
                            {p.grad_logits, p.grad_logits_row_stride},
                            {p.target.probabilities, p.target.probabilities_row_stride}};
  return dispatch_floating(p.dtype, [&](auto tag) {
    using T = typename std::decay_t<decltype(tag)>::type;
    return with_access<T>(kind_of(tensors, p.dtype, p.rows, p.classes), [&](auto access) {
      using Access = typename std::decay_t<decltype(access)>::type;
      const int64_t vectors = ceil_div(p.classes, Access::kLanes) + (Access::kWhole ? 0 : 1);
      // Twice what a block has on the way, or all of a shorter row.
      const int64_t longest = int64_t{kGradientThreads} * kGradientItems * 2;
      const int64_t parts = ceil_div(vectors, longest);
      if (p.rows * parts > kMaxGridX) return Status{"too many rows for one launch"};
      const int64_t warps = std::min<int64_t>(ceil_div(vectors, kGradientItems * kWarpLanes),
                                              kGradientThreads / kWarpLanes);
      const Grid grid{dim3(static_cast<unsigned>(p.rows * parts)),
                      dim3(static_cast<unsigned>(warps * kWarpLanes))};
      const int count = static_cast<int>(parts);
      const int length =
          static_cast<int>(ceil_div(ceil_div(vectors, parts), kWarpLanes)) * kWarpLanes;
      return is_spread(p.target) ? launch_overlapped(cross_entropy_gradient<Access, true>, grid,
                                                     stream, p, count, length)
                                 : launch_overlapped(cross_entropy_gradient<Access, false>, grid,
                                                     stream, p, count, length);
    });
  });
}

Status loss_sum(const LossSum& p, CUstream_st* stream) {
  const Grid grid{dim3(1), dim3(kSumThreads)};
  if (p.dtype == Dtype::float64) return launch_overlapped(sum_losses<double>, grid, stream, p);
  return launch_overlapped(sum_losses<float>, grid, stream, p);
}

}  // namespace torchkiln::cuda
