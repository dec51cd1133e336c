// Gradients for groups that fit in the registers of a team. One kernel reads each element once and
// writes grad_x. Another kernel, which reads grad and x again, sums over the samples for weight and
// bias.

#include "samples.cuh"
#include "teams.cuh"

namespace torchkiln::cuda {
namespace {

/// Writes grad_x of a group, by the team that has its elements in registers.
template <class Tile, class Act>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks<Tile, 2>)
    team_input_gradients(GroupNormBackward p, GroupRows rows, Act act) {
  using T = typename Tile::T;
  using C = Compute<T>;
  constexpr int kLanes = Tile::kLanes;
  constexpr int kItems = Tile::kItems;
  __shared__ TeamStorage<C, 2> storage;
  wait_for_previous_kernel();
  Team<C, 2> team(rows.team, storage);
  const int64_t row = team.first_team() + team.index();
  const int64_t all = p.layout.all_groups(), count = p.layout.count();
  const bool inside = row < all;
  const T* const x = static_cast<const T*>(p.x) + row * count;
  const Tile tile(x, inside ? static_cast<int>(count) : 0, team.rank(), team.size());
  typename Tile::Item items[kItems], grads[kItems];
  tile.load(x, items);
  tile.load(static_cast<const T*>(p.grad) + row * count, grads);
  team.init_barriers();
  const C* const statistics = static_cast<const C*>(p.statistics) + (inside ? row : 0);
  const C mean = statistics[0], low = statistics[all], rstd = statistics[2 * all];
  const GroupParameters<Tile> parameters(p, rows, inside ? row : 0);
  // Computes g, x - mean, and the factors of item k.
  const auto differentiate_item = [&](int k, C(&g)[kLanes], C(&from_mean)[kLanes],
                                      C(&weight)[kLanes], C(&scale)[kLanes]) {
    C bias[kLanes];
    parameters.load(tile, k, weight, bias);
    differentiate(act, mean, low, rstd, items[k], grads[k], weight, bias, g, from_mean, scale);
  };
  C sums[2] = {};
  for_each_item<Act, kItems>([&](int k) {
    if (!tile.has_any(k)) return;
    C g[kLanes], from_mean[kLanes], weight[kLanes], scale[kLanes];
    differentiate_item(k, g, from_mean, weight, scale);
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      const C product = weight[i] * g[i];
      sums[0] += product;
      sums[1] = fma(product, from_mean[i], sums[1]);
    }
  });
  team.reduce(sums, Sum{});
  const C inverse_count = C(1) / static_cast<C>(count);
  const C slope = (sums[1] - low * sums[0]) * rstd * rstd * rstd * inverse_count;
  const C level = sums[0] * rstd * inverse_count - slope * low;
  T* const grad_x = static_cast<T*>(p.grad_x) + row * count;
  for_each_item<Act, kItems>([&](int k) {
    C g[kLanes], from_mean[kLanes], weight[kLanes], scale[kLanes];
    differentiate_item(k, g, from_mean, weight, scale);
#pragma unroll
    for (int i = 0; i < kLanes; ++i) g[i] = fma(-slope, from_mean[i], g[i] * scale[i]) - level;
    tile.save(inside, grad_x, k, g);
  });
}

Status input_gradients(const GroupNormBackward& p, const GroupTeamPlan& plan, CUstream_st* stream) {
  return with_group_rows(p, plan, [&](auto tag, auto act, const GroupRows& rows) -> Status {
    using Tile = typename decltype(tag)::type;
    Grid grid;
    const Status fits = make_grid(rows.team, p.layout.all_groups(), grid);
    if (!fits.ok()) return fits;
    return launch_overlapped(team_input_gradients<Tile, decltype(act)>, grid, stream, p, rows, act);
  });
}

Status parameter_gradients(const GroupNormBackward& p, const GroupSamplesPlan& plan,
                           Allocate allocate, CUstream_st* stream) {
  return dispatch_floating(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return with_team_activation<T>(p.activation, [&](auto act) {
      return plan.lanes > 1
                 ? launch_sample_sums<T, kVectorLanes<T>, false>(p, plan, act, allocate, stream,
                                                                 nullptr)
                 : launch_sample_sums<T, 1, false>(p, plan, act, allocate, stream, nullptr);
    });
  });
}

}  // namespace

Status group_norm_backward_by_teams(const GroupNormBackward& p, const GroupTeamsPlan& plan,
                                    Allocate allocate, CUstream_st* stream) {
  if (p.grad_weight != nullptr || p.grad_bias != nullptr) {
    const Status status = parameter_gradients(p, plan.parameters, allocate, stream);
    if (!status.ok()) return status;
  }
  return p.grad_x == nullptr ? Status{} : input_gradients(p, plan.input, stream);
}

}  // namespace torchkiln::cuda
