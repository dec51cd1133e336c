// Loss and log-sum-exp of each row of logits, read once, and the sum of the losses. The last three
// plans also compute the log-probability of a class and the entropy (RowForm::logprob).
//
//   plan       kernel                    when
//   few rows   cross_entropy_few_rows    the sum is wanted, and one block or cluster has all rows
//   flat       cross_entropy_flat_rows   adjacent rows of up to 512 bytes, not of whole vectors
//   inner      cross_entropy_rows        rows of any offset that one step of a team holds
//   once       cross_entropy_rows        rows of whole vectors that one step of a team holds
//   steps      cross_entropy_rows        longer rows, and targets spread over the classes
//
// A team is part of a warp, a block, or a cluster of blocks if rows are few and long.
// forward_row.cuh has the loss of a row, forward_flat.cuh the flat kernel, target.cuh the target.
// Gradients: backward.cu.

#include "detail/reduce/common.cuh"
#include "forward_flat.cuh"

namespace torchkiln::cuda {

using namespace reduce;
namespace {

/// Computes one row per team.
template <class Access, RowForm kForm, int kItems, RowPass kPass>
__global__ void __launch_bounds__(kLossThreads, 4)
    cross_entropy_rows(CrossEntropy p, TeamShape shape) {
  using C = Compute<typename Access::T>;
  __shared__ TeamStorage<C, kLossValues<kForm>> storage;
  wait_for_previous_kernel();
  Team<C, kLossValues<kForm>> team(shape, storage);
  (void)loss_of_row<Access, kForm, kItems, kPass>(p, team, team.first_team() + team.index());
}

/// Adds the losses and the weights of the threads of a team, and stores the result.
template <class C>
__device__ __forceinline__ void store_sum(const LossSum& p, Team<double, 2>& team,
                                          double (&sums)[2]) {
  team.reduce(sums, Sum{});
  if (team.rank() > 0) return;
  Result{p.out, p.out_dtype, 1}.store(0, p.mean ? sums[0] / sums[1] : sums[0]);
  if (p.mean) *static_cast<C*>(p.divisor) = static_cast<C>(sums[1]);
}

/// Processes all rows in one block or cluster, one row per team, and adds their losses.
template <class Access, RowForm kForm, int kItems, RowPass kPass>
__global__ void __launch_bounds__(kFewThreads, 1)
    cross_entropy_few_rows(CrossEntropy p, LossSum total, TeamShape shape, TeamShape all_shape) {
  using C = Compute<typename Access::T>;
  __shared__ TeamStorage<C, kLossValues<kForm>> storage;
  __shared__ TeamStorage<double, 2> all_storage;
  Team<double, 2> all(all_shape, all_storage);
  all.init_barriers();
  wait_for_previous_kernel();
  Team<C, kLossValues<kForm>, true> team(shape, storage);
  const RowLoss<C> row =
      loss_of_row<Access, kForm, kItems, kPass>(p, team, team.first_team() + team.index());
  double sums[2] = {static_cast<double>(row.loss), static_cast<double>(row.weight)};
  store_sum<C>(total, all, sums);
}

/// Adds the losses and the weights of all rows, by one team: a block or a cluster.
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
  store_sum<C>(p, team, sums);
}

Status add_losses(const LossSum& p, const Device& device, CUstream_st* stream) {
  const TeamShape team = choose(p, device);
  Grid grid;
  const Status status = make_grid(team, 1, grid);
  if (!status.ok()) return status;
  return p.dtype == Dtype::float64 ? launch_overlapped(sum_losses<double>, grid, stream, p, team)
                                   : launch_overlapped(sum_losses<float>, grid, stream, p, team);
}

template <class Access, RowForm kForm, int kItems, RowPass kPass>
Status launch_rows(const CrossEntropy& p, const LossSum* total, const CrossEntropyPlan& plan,
                   CUstream_st* stream) {
  Grid grid;
  if constexpr (kPass != RowPass::inner && kForm != RowForm::logprob) {
    if (plan.all) {
      const Status status = make_grid(*plan.all, 1, grid);
      return status.ok() ? launch_overlapped(cross_entropy_few_rows<Access, kForm, kItems, kPass>,
                                             grid, stream, p, *total, plan.team, *plan.all)
                         : status;
    }
  }
  const Status status = make_grid(plan.team, p.rows, grid);
  return status.ok() ? launch_overlapped(cross_entropy_rows<Access, kForm, kItems, kPass>, grid,
                                         stream, p, plan.team)
                     : status;
}

/// Launches the kernel for targets that are class indices.
template <class Access, RowForm kForm>
Status launch_pass(const CrossEntropy& p, const LossSum* total, const CrossEntropyPlan& plan,
                   CUstream_st* stream) {
  if constexpr (!Access::kAligned) {
    if (plan.pass == RowPass::inner)
      return launch_rows<Access, kForm, kShortItems, RowPass::inner>(p, total, plan, stream);
  }
  return plan.pass == RowPass::once
             ? launch_rows<Access, kForm, kShortItems, RowPass::once>(p, total, plan, stream)
             : launch_rows<Access, kForm, kLongItems, RowPass::steps>(p, total, plan, stream);
}

template <class T>
Status launch(const CrossEntropy& p, const LossSum* total, const CrossEntropyPlan& plan,
              CUstream_st* stream) {
  if (plan.flat) return launch_flat_rows<T>(p, *plan.flat, stream);
  return with_vectors<T>(plan.alignment, [&](auto access) {
    using Access = typename std::decay_t<decltype(access)>::type;
    switch (form_of(p)) {
      case RowForm::spread:
        return launch_rows<Access, RowForm::spread, kSpreadItems, RowPass::steps>(p, total, plan,
                                                                                  stream);
      case RowForm::logprob:
        return launch_pass<Access, RowForm::logprob>(p, total, plan, stream);
      default:
        return launch_pass<Access, RowForm::target>(p, total, plan, stream);
    }
  });
}

}  // namespace

Status cross_entropy(const CrossEntropy& given, const LossSum* total, CUstream_st* stream) {
  const CrossEntropy p = with_all_classes(given);
  if (p.rows == 0 || p.classes == 0) return {};
  if (p.classes > kMaxColumns) return {kTooLong};
  const Device& device = current_device();
  const CrossEntropyPlan plan = choose(p, alignment_of_rows(p), total != nullptr, device);
  const Status status = dispatch_floating(p.dtype, [&](auto tag) {
    return launch<typename std::decay_t<decltype(tag)>::type>(p, total, plan, stream);
  });
  const bool is_added = total == nullptr || plan.all;
  return status.ok() && !is_added ? add_losses(*total, device, stream) : status;
}

Status loss_sum(const LossSum& p, CUstream_st* stream) {
  return add_losses(p, current_device(), stream);
}

}  // namespace torchkiln::cuda
