// Gradients for groups that a team holds. One kernel reads each element once and writes grad_x. The
// gradients of weight and bias are sums over the samples, which read grad and x again.

#include "launch.cuh"
#include "sums.cuh"
#include "teams.cuh"

namespace torchkiln::cuda {
namespace {

/// grad_x of a group, by the team that has its elements in registers.
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
  // g, x - mean, and the factors of item k.
  const auto differentiate = [&](int k, C(&g)[kLanes], C(&from_mean)[kLanes], C(&weight)[kLanes],
                                 C(&scale)[kLanes]) {
    C z[kLanes], shift[kLanes];
    parameters.load(tile, k, weight, shift);
    set_factors(low, rstd, weight, scale, shift);
    widen(items[k], from_mean);
    widen(grads[k], g);
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      from_mean[i] -= mean;
      z[i] = fma(from_mean[i], scale[i], shift[i]);
    }
    act.differentiate(g, z);
  };
  C sums[2] = {};
  for_each_item<Act, kItems>([&](int k) {
    if (!tile.has_any(k)) return;
    C g[kLanes], from_mean[kLanes], weight[kLanes], scale[kLanes];
    differentiate(k, g, from_mean, weight, scale);
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
    differentiate(k, g, from_mean, weight, scale);
#pragma unroll
    for (int i = 0; i < kLanes; ++i) g[i] = fma(-slope, from_mean[i], g[i] * scale[i]) - level;
    tile.save(inside, grad_x, k, g);
  });
}

/// Sums of g and of g * n over samples, for each of the elements of a sample:
/// [parts, 2, elements]. Block (x, y): a tile of the elements, every parts-th group of samples.
template <class T, int kLanes, class Act>
__global__ void __launch_bounds__(kSampleThreads, 2)
    sample_sums(GroupNormBackward p, Divisor inner, Act act, Compute<T>* partial) {
  using C = Compute<T>;
  constexpr int kRows = kSampleThreads / kWarpLanes;
  __shared__ C shared[kRows][2][kLanes][kWarpLanes];
  wait_for_previous_kernel();
  const GroupLayout& layout = p.layout;
  const int64_t elements = layout.channels * layout.inner, all = layout.all_groups();
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int place = static_cast<int>(threadIdx.x) / kWarpLanes;
  const int64_t at = (int64_t{blockIdx.x} * kWarpLanes + lane) * kLanes;
  C sums[2][kLanes] = {};
  if (at < elements) {
    int64_t channels[kLanes];
    C weight[kLanes], bias[kLanes];
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      channels[i] = inner.quotient(static_cast<uint32_t>(at + i));
      weight[i] = C(1), bias[i] = C(0);
    }
    if (p.weight != nullptr) read_parameters(p.weight, channels, p.parameter_dtype, weight);
    if (p.bias != nullptr) read_parameters(p.bias, channels, p.parameter_dtype, bias);
    const int64_t group = channels[0] / layout.channels_per_group();
#pragma unroll(Act::kIsFixed ? 4 : 1)
    for (int64_t sample = int64_t{blockIdx.y} * kRows + place; sample < layout.batch;
         sample += int64_t{gridDim.y} * kRows) {
      const auto x = load_vector<kLanes>(static_cast<const T*>(p.x) + sample * elements + at);
      const auto grad = load_vector<kLanes>(static_cast<const T*>(p.grad) + sample * elements + at);
      const C* const statistics =
          static_cast<const C*>(p.statistics) + sample * layout.groups + group;
      const C mean = statistics[0], low = statistics[all], rstd = statistics[2 * all];
      C z[kLanes], g[kLanes], from_mean[kLanes], scale[kLanes], shift[kLanes];
      widen(x, from_mean);
      widen(grad, g);
#pragma unroll
      for (int i = 0; i < kLanes; ++i) shift[i] = bias[i];
      set_factors(low, rstd, weight, scale, shift);
#pragma unroll
      for (int i = 0; i < kLanes; ++i) {
        from_mean[i] -= mean;
        z[i] = fma(from_mean[i], scale[i], shift[i]);
      }
      act.differentiate(g, z);
#pragma unroll
      for (int i = 0; i < kLanes; ++i) {
        sums[0][i] += g[i];
        sums[1][i] = fma(g[i], (from_mean[i] - low) * rstd, sums[1][i]);
      }
    }
  }
#pragma unroll
  for (int v = 0; v < 2; ++v) {
#pragma unroll
    for (int i = 0; i < kLanes; ++i) shared[place][v][i][lane] = sums[v][i];
  }
  __syncthreads();
  for (int v = place; v < 2 * kLanes; v += kRows) {
    const int which = v / kLanes, i = v % kLanes;
    C total = 0;
#pragma unroll
    for (int row = 0; row < kRows; ++row) total += shared[row][which][i][lane];
    if (at < elements) partial[(int64_t{blockIdx.y} * 2 + which) * elements + at + i] = total;
  }
}

/// Channels of a block that adds `inner` elements of each. With few elements, adjacent threads have
/// adjacent channels; with many, adjacent elements of a channel.
inline int channels_of_block(int64_t inner) {
  int channels = kWarpLanes;
  while (channels > 1 && channels * inner > kWarpLanes) channels /= 2;
  return channels;
}

/// The gradients of weight and bias: sums over the parts and the elements of a channel.
template <class C>
__global__ void __launch_bounds__(kTotalThreads)
    add_elements(GroupNormBackward p, Divisor inner, const C* partial, int parts, int width) {
  wait_for_previous_kernel();
  const int64_t channels = p.layout.channels, elements = channels * p.layout.inner;
  const int64_t channel = int64_t{blockIdx.x} * width + static_cast<int>(threadIdx.x) % width;
  const int terms = parts * static_cast<int>(inner.divisor());
  double total[2] = {};
  if (channel < channels) {
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x) / width; i < terms; i += kTotalThreads / width) {
      const uint32_t part = inner.quotient(static_cast<uint32_t>(i));
      const C* const from = partial + int64_t{part} * 2 * elements + channel * inner.divisor() +
                            (static_cast<uint32_t>(i) - part * inner.divisor());
      total[0] += static_cast<double>(from[0]);
      total[1] += static_cast<double>(from[elements]);
    }
  }
  if (!add_slices(total, width) || channel >= channels) return;
  store_parameter_gradients(p, channel, total);
}

template <int kLanes, class T, class Act>
Status launch_sample_sums(const GroupNormBackward& p, const GroupSamplesPlan& plan, const Act& act,
                          Allocate allocate, CUstream_st* stream) {
  using C = Compute<T>;
  const int64_t elements = p.layout.channels * p.layout.inner;
  auto* const partial =
      static_cast<C*>(allocate(static_cast<size_t>(2 * plan.parts * elements) * sizeof(C)));
  const Grid of_samples{dim3(static_cast<unsigned>(plan.tiles), static_cast<unsigned>(plan.parts)),
                        kSampleThreads};
  const Divisor inner(static_cast<uint32_t>(p.layout.inner));
  const Status status =
      launch_overlapped(sample_sums<T, kLanes, Act>, of_samples, stream, p, inner, act, partial);
  if (!status.ok()) return status;
  const int width = channels_of_block(p.layout.inner);
  const Grid of_channels{dim3(static_cast<unsigned>(ceil_div(p.layout.channels, width))),
                         kTotalThreads};
  return launch_overlapped(add_elements<C>, of_channels, stream, p, inner,
                           static_cast<const C*>(partial), static_cast<int>(plan.parts), width);
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
      return plan.lanes > 1 ? launch_sample_sums<kVectorLanes<T>, T>(p, plan, act, allocate, stream)
                            : launch_sample_sums<1, T>(p, plan, act, allocate, stream);
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
