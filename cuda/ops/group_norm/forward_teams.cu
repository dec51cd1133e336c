// Groups that fit in the registers of a team of threads: statistics and y in one kernel, which
// reads each element once. choose_teams.h has the conditions.

#include "launch.cuh"
#include "teams.cuh"

namespace torchkiln::cuda {
namespace {

template <class Tile, class Act>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks<Tile>)
    team_outputs(GroupNorm p, GroupRows rows, Act act) {
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
  typename Tile::Item items[kItems];
  tile.load(x, items);
  team.init_barriers();
  C total[1] = {};
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    C z[kLanes];
    widen(items[k], z);
#pragma unroll
    for (int i = 0; i < kLanes; ++i) total[0] += z[i];
  }
  force_reconversion(items);
  team.reduce(total, Sum{});
  const C inverse_count = C(1) / static_cast<C>(count);
  const C mean = total[0] * inverse_count;
  C moments[2] = {};
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    C z[kLanes];
    widen(items[k], z);
    const C from = tile.has_any(k) ? mean : C(0);
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      const C distance = z[i] - from;
      moments[0] += distance * distance;
      moments[1] += distance;
    }
  }
  force_reconversion(items);
  team.reduce(moments, Sum{});
  const C low = moments[1] * inverse_count;
  const C variance = moments[0] * inverse_count - low * low;
  const C rstd = C(1) / sqrt(variance + static_cast<C>(p.eps));
  if (inside && team.rank() == 0) {
    C* const to = static_cast<C*>(p.statistics) + row;
    to[0] = mean;
    to[all] = low;
    to[2 * all] = rstd;
  }
  const GroupParameters<Tile> parameters(p, rows, inside ? row : 0);
  T* const y = static_cast<T*>(p.y) + row * count;
  for_each_item<Act, kItems>([&](int k) {
    C z[kLanes], weight[kLanes], scale[kLanes], shift[kLanes];
    parameters.load(tile, k, weight, shift);
    set_factors(low, rstd, weight, scale, shift);
    widen(items[k], z);
#pragma unroll
    for (int i = 0; i < kLanes; ++i) z[i] = fma(z[i] - mean, scale[i], shift[i]);
    act.apply(z);
    tile.save(inside, y, k, z);
  });
}

}  // namespace

Status group_norm_by_teams(const GroupNorm& p, const GroupTeamPlan& plan, CUstream_st* stream) {
  return with_group_rows(p, plan, [&](auto tag, auto act, const GroupRows& rows) -> Status {
    using Tile = typename decltype(tag)::type;
    Grid grid;
    const Status fits = make_grid(rows.team, p.layout.all_groups(), grid);
    if (!fits.ok()) return fits;
    return launch_overlapped(team_outputs<Tile, decltype(act)>, grid, stream, p, rows, act);
  });
}

}  // namespace torchkiln::cuda
