// Loss and log-sum-exp of each row of logits, read once, and the sum of the losses.
//
//   plan       kernel                    when
//   few rows   cross_entropy_few_rows    the sum is wanted, and one cluster reads all rows quickly
//   flat       cross_entropy_flat_rows   adjacent rows of up to 512 bytes, not of whole vectors
//   inner      cross_entropy_rows        rows of any offset that one step of a team holds
//   once       cross_entropy_rows        rows of whole vectors that one step of a team holds
//   steps      cross_entropy_rows        longer rows, and targets spread over the classes
//
// A team is part of a warp, a block, or a cluster of blocks if rows are few and long.
// forward_row.cuh has the loss of a row, forward_flat.cuh the flat kernel, target.cuh the target.
// Gradients: backward.cu.

#include <optional>

#include "detail/reduce/common.cuh"
#include "forward_flat.cuh"

namespace torchkiln::cuda {

using namespace reduce;
namespace {

/// A team has one row.
template <class Access, bool kSpread, int kItems, RowPass kPass>
__global__ void __launch_bounds__(kLossThreads, 4)
    cross_entropy_rows(CrossEntropy p, TeamShape shape) {
  using C = Compute<typename Access::T>;
  __shared__ TeamStorage<C, kLossValues<kSpread>> storage;
  wait_for_previous_kernel();
  Team<C, kLossValues<kSpread>> team(shape, storage);
  (void)loss_of_row<Access, kSpread, kItems, kPass>(p, team, team.first_team() + team.index());
}

/// Adds the losses and the weights that the threads of a team have, and stores the result.
template <class C>
__device__ __forceinline__ void store_sum(const LossSum& p, Team<double, 2>& team,
                                          double (&sums)[2]) {
  team.reduce(sums, Sum{});
  if (team.rank() > 0) return;
  Result{p.out, p.out_dtype, 1}.store(0, p.mean ? sums[0] / sums[1] : sums[0]);
  if (p.mean) *static_cast<C*>(p.divisor) = static_cast<C>(sums[1]);
}

constexpr int kFewThreads = 512;

/// One block or cluster has all rows, one per team, and adds their losses, too.
template <class Access, bool kSpread, int kItems, RowPass kPass>
__global__ void __launch_bounds__(kFewThreads, 1)
    cross_entropy_few_rows(CrossEntropy p, LossSum total, TeamShape shape, TeamShape all_shape) {
  using C = Compute<typename Access::T>;
  __shared__ TeamStorage<C, kLossValues<kSpread>> storage;
  __shared__ TeamStorage<double, 2> all_storage;
  Team<double, 2> all(all_shape, all_storage);
  all.init_barriers();
  wait_for_previous_kernel();
  Team<C, kLossValues<kSpread>, true> team(shape, storage);
  const RowLoss<C> row =
      loss_of_row<Access, kSpread, kItems, kPass>(p, team, team.first_team() + team.index());
  double sums[2] = {static_cast<double>(row.loss), static_cast<double>(row.weight)};
  store_sum<C>(total, all, sums);
}

constexpr int kSumThreads = 1024;
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
  store_sum<C>(p, team, sums);
}

/// The team of cross_entropy_rows().
TeamShape team_of_rows(const CrossEntropy& p, int64_t vectors) {
  const int64_t threads = ceil_div(vectors, kShortItems);
  const Device device = current_device();
  TeamShape team = make_team(threads, kLossThreads, threads <= kWarpLanes ? 128 : 0, 1);
  // Long rows, too few to occupy every SM, are shared by the blocks of a cluster.
  while (device.runs_90_code && team.threads == kLossThreads && team.blocks() < kMaxClusterBlocks &&
         p.rows * team.blocks() < 2 * device.multiprocessors && threads > 2 * team.size()) {
    ++team.log_blocks;
  }
  return team;
}

/// The teams of cross_entropy_few_rows().
struct FewRows {
  TeamShape team;
  TeamShape all;
};

/// A plan if one cluster reads the logits faster than a second kernel would start, by measurement.
std::optional<FewRows> plan_few_rows(const CrossEntropy& p, int64_t vectors) {
  constexpr int64_t kMostBytesOfRow = 64 << 10;   // a block with one row
  constexpr int64_t kMostBytesOfRows = 32 << 10;  // a block with several
  const int64_t row_bytes = p.classes * static_cast<int64_t>(size_of(p.dtype));
  const int most_blocks = current_device().runs_90_code ? kMaxClusterBlocks : 1;
  const bool fits = p.rows <= most_blocks ? row_bytes <= kMostBytesOfRow
                                          : p.rows * row_bytes <= most_blocks * kMostBytesOfRows;
  if (!fits) return {};
  FewRows plan{};
  const int64_t rows_of_block = ceil_div(p.rows, most_blocks);
  const int64_t threads = std::min(kFewThreads / rows_of_block, ceil_div(vectors, 4));
  int least_teams = 1;
  if (threads >= 2 * kWarpLanes) {
    const int64_t warps = threads / kWarpLanes;
    plan.team = make_team(warps * kWarpLanes, kFewThreads, kFewThreads, 1);
  } else {
    plan.team = make_team(ceil_div(vectors, kShortItems), kWarpLanes, kFewThreads, 1);
    // Two warps: a team of up to 32 threads per block exchanges nothing between the blocks.
    least_teams = 2 * kWarpLanes / plan.team.threads;
  }
  const int64_t teams = ceil_div(rows_of_block, least_teams) * least_teams;
  if (teams > plan.team.per_block) return {};
  plan.team.per_block = static_cast<int>(teams);
  const int64_t blocks = ceil_div(p.rows, teams);
  plan.all = {plan.team.block_threads(), 31, ceil_log2(blocks), 1};
  return plan;
}

}  // namespace

Status cross_entropy(const CrossEntropy& given, const LossSum* total, CUstream_st* stream) {
  const CrossEntropy p = with_all_classes(given);
  if (p.rows == 0 || p.classes == 0) return {};
  if (p.classes > kMaxColumns) return {kTooLong};
  const TensorRows tensors[] = {{p.logits, p.row_stride}, probability_rows(p.target, p.dtype)};
  const Alignment alignment = with_probabilities(alignment_of(tensors, p.dtype, p.rows, p.classes),
                                                 p.target, p.dtype, p.classes);
  return dispatch_floating(p.dtype, [&](auto tag) {
    using T = typename std::decay_t<decltype(tag)>::type;
    const auto with_sum = [&](const Status& status) {
      return status.ok() && total != nullptr ? loss_sum(*total, stream) : status;
    };
    return with_vectors<T>(alignment, [&](auto access) {
      using Access = typename std::decay_t<decltype(access)>::type;
      const int64_t vectors = ceil_div(p.classes, Access::kLanes) + (Access::kAligned ? 0 : 1);
      const std::optional<FewRows> few =
          total == nullptr ? std::nullopt : plan_few_rows(p, vectors);
      if (!few && takes_flat_rows(p, alignment)) return with_sum(launch_flat_rows<T>(p, stream));
      const TeamShape team = few ? few->team : team_of_rows(p, vectors);
      const auto launch_few = [&](auto kernel) {
        Grid grid;
        const Status status = make_grid(few->all, 1, grid);
        return status.ok() ? launch_overlapped(kernel, grid, stream, p, *total, team, few->all)
                           : status;
      };
      const auto launch = [&](auto kernel, const TeamShape& shape) {
        Grid grid;
        const Status status = make_grid(shape, p.rows, grid);
        return status.ok() ? with_sum(launch_overlapped(kernel, grid, stream, p, shape)) : status;
      };
      const auto launch_rows = [&](auto spread, auto items, auto pass) {
        return few ? launch_few(cross_entropy_few_rows<Access, spread, items, pass>)
                   : launch(cross_entropy_rows<Access, spread, items, pass>, team);
      };
      using Steps = std::integral_constant<RowPass, RowPass::steps>;
      using Once = std::integral_constant<RowPass, RowPass::once>;
      using SpreadItems = std::integral_constant<int, kSpreadItems>;
      using LongItems = std::integral_constant<int, kLongItems>;
      using ShortItems = std::integral_constant<int, kShortItems>;
      if (is_spread(p.target)) return launch_rows(std::true_type{}, SpreadItems{}, Steps{});
      if constexpr (!Access::kAligned) {
        using Tile = UnalignedRowTile<T, kShortItems>;
        const int64_t inner = Tile::inner_vectors(p.classes);
        const TeamShape shape = team_of_rows(p, inner);
        if (!few && shape.size() >= Tile::kMinThreads && inner <= kShortItems * shape.size())
          return launch(cross_entropy_rows<Access, false, kShortItems, RowPass::inner>, shape);
      }
      if (vectors <= int64_t{kShortItems} * team.size())
        return launch_rows(std::false_type{}, ShortItems{}, Once{});
      return launch_rows(std::false_type{}, LongItems{}, Steps{});
    });
  });
}

Status loss_sum(const LossSum& p, CUstream_st* stream) {
  const bool uses_cluster = current_device().runs_90_code && p.rows >= kFewestRowsOfCluster;
  const TeamShape team =
      uses_cluster
          ? kSumCluster
          : make_team(std::max<int64_t>(ceil_div(p.rows, 4), kWarpLanes), kSumThreads, 0, 1);
  Grid grid;
  const Status status = make_grid(team, 1, grid);
  if (!status.ok()) return status;
  return p.dtype == Dtype::float64 ? launch_overlapped(sum_losses<double>, grid, stream, p, team)
                                   : launch_overlapped(sum_losses<float>, grid, stream, p, team);
}

}  // namespace torchkiln::cuda
