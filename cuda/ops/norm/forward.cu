#include "torchkiln/kernels/norm.h"

#include "detail/rowwise/tile.cuh"

namespace torchkiln::cuda {

using namespace device;
using namespace rowwise;
namespace {

/// What an element is multiplied by once it is normalized, and what is added to that: of item `at`
/// of a place, or of the vector at column `at`.
template <class From, class C, int kLanes>
__device__ __forceinline__ void load_affine(const Norm& p, const From& from, int at,
                                            C (&weight)[kLanes], C (&bias)[kLanes]) {
#pragma unroll
  for (int i = 0; i < kLanes; ++i) {
    weight[i] = C(1);
    bias[i] = C(0);
  }
  with_parameter_type<typename From::T>(p.weight_dtype, [&](auto tag) {
    using W = typename decltype(tag)::type;
    if (p.weight != nullptr) {
      from.load_parameters(at, static_cast<const W*>(p.weight), weight);
#pragma unroll
      for (int i = 0; i < kLanes; ++i) weight[i] += static_cast<C>(p.weight_offset);
    }
    if (p.bias != nullptr) from.load_parameters(at, static_cast<const W*>(p.bias), bias);
  });
}

/// A team reads a row and, with all of it in registers, finds its mean and spread and writes it.
/// W: the type of the weight and, for layer norm, of the bias; without one of them, void.
template <class Tile, class W, bool kCentered>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks<Tile>)
    norm_rows(Norm p, TeamShape shape) {
  using T = typename Tile::T;
  using C = Compute<T>;
  constexpr int kLanes = Tile::kLanes;
  constexpr int kItems = Tile::kItems;
  constexpr int kPublished = kCentered ? (sizeof(T) > 2 ? 4 : 3) : 1;
  constexpr bool kAffine = !std::is_void_v<W>;
  __shared__ TeamStorage<C, kPublished> storage;
  wait_for_previous_kernel();
  Team<C, kPublished> team(shape, storage);
  const int64_t row = team.first() + team.index();
  const bool inside = row < p.rows;
  const T* x = static_cast<const T*>(p.x) + row * p.x_row_stride;
  const Tile tile(x, inside ? static_cast<int>(p.columns) : 0, team.rank(), team.size());
  typename Tile::Item items[kItems];
  tile.load(x, items);
  if (p.residual != nullptr) {
    typename Tile::Item others[kItems];
    tile.load(static_cast<const T*>(p.residual) + row * p.residual_row_stride, others);
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      C both[kLanes], other[kLanes];
      widen(items[k], both);
      widen(others[k], other);
#pragma unroll
      for (int i = 0; i < Tile::lanes(k); ++i) {
        both[i] += other[i];
        items[k].lane[i] = convert<T>(both[i]);
      }
      tile.save(inside, static_cast<T*>(p.sum) + row * p.columns, k, both);
    }
  }

  team.init_barriers();

  // Each warp has the sum of squares around a mean of its own, and adds how far that is from the
  // mean of all: the warps meet once, and no digits are lost to a large mean.
  const C share = C(1) / static_cast<C>(p.columns);
  C count = 0, center = 0;
  if constexpr (kCentered) {
    C total[1] = {};
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      C z[kLanes];
      widen(items[k], z);
#pragma unroll
      for (int i = 0; i < Tile::lanes(k); ++i) total[0] += z[i];
    }
    widen_anew(items);
    team.reduce_in_warp(total, Sum{});
    const int lanes = min(team.size(), kWarpLanes);
    count = static_cast<C>(tile.count_of_lanes(team.rank() & (lanes - 1), lanes));
    center = count > 0 ? total[0] / count : C(0);
  }
  // What is left of a mean after it was rounded matters to the digits of float32 alone.
  constexpr bool kCorrects = kCentered && sizeof(T) > 2;
  C around[kCorrects ? 2 : 1] = {};
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    C z[kLanes];
    widen(items[k], z);
    // Of no item all lanes are 0, and so is their distance: one choice for all of them.
    const C from = tile.has_any(k) ? center : C(0);
#pragma unroll
    for (int i = 0; i < Tile::lanes(k); ++i) {
      const C distance = kCentered ? z[i] - from : z[i];
      around[0] += distance * distance;
      if constexpr (kCorrects) around[1] += distance;
    }
  }
  widen_anew(items);
  team.reduce_in_warp(around, Sum{});
  C mean = 0, variance, rest = 0;
  if constexpr (kCorrects) {
    const C published[kPublished] = {count, center, around[0], around[1]};
    using Published = const C(&)[kPublished];
    team.publish(published);
    C total[1];
    team.reduce_published(published, total, Sum{},
                          [](Published of, C(&to)[1]) { to[0] = of[0] * of[1]; });
    mean = total[0] * share;
    C moments[2];
    team.reduce_published(published, moments, Sum{}, [mean](Published of, C(&to)[2]) {
      const C distance = of[1] - mean;
      to[0] = of[2] + of[0] * distance * distance + C(2) * distance * of[3];
      to[1] = of[3] + of[0] * distance;
    });
    rest = moments[1] * share;
    variance = moments[0] * share - rest * rest;
  } else if constexpr (kCentered) {
    // Half precision has digits to spare: all is measured from the first warp's mean, at once. What
    // cancels of the squares is at most as many times the rest as there are warps.
    const C published[kPublished] = {count, center, around[0]};
    using Published = const C(&)[kPublished];
    team.publish(published);
    const C from = team.first_published(published, 1);
    C moments[2];
    team.reduce_published(published, moments, Sum{}, [from](Published of, C(&to)[2]) {
      const C distance = of[1] - from;
      to[0] = of[0] * distance;
      to[1] = of[2] + to[0] * distance;
    });
    const C shift = moments[0] * share;
    mean = from + shift;
    variance = moments[1] * share - shift * shift;
    if (variance < C(0)) variance = 0;  // rounded; NaN stays
  } else {
    team.reduce_warps(around, Sum{});
    variance = around[0] * share;
  }
  const C rstd = rsqrt(variance + static_cast<C>(p.eps));
  if (inside && team.rank() == 0) {
    if (kCentered && p.mean != nullptr) static_cast<C*>(p.mean)[row] = mean + rest;
    if (p.rstd != nullptr) static_cast<C*>(p.rstd)[row] = rstd;
  }
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    C z[kLanes], weight[kLanes], bias[kLanes];
    widen(items[k], z);
    if constexpr (kAffine) {
      tile.load_parameters(k, static_cast<const W*>(p.weight), weight);
      if constexpr (kCentered) tile.load_parameters(k, static_cast<const W*>(p.bias), bias);
    } else {
      load_affine(p, tile, k, weight, bias);
    }
#pragma unroll
    for (int i = 0; i < Tile::lanes(k); ++i) {
      if constexpr (kAffine && !kCentered) weight[i] += static_cast<C>(p.weight_offset);
      if constexpr (kCentered) z[i] -= mean;
      if constexpr (kCorrects) z[i] -= rest;
      z[i] *= rstd * weight[i];
      if constexpr (kCentered) z[i] += bias[i];
    }
    tile.save(inside, static_cast<T*>(p.y) + row * p.columns, k, z);
  }
}

/// Rows that are longer than the registers of a cluster: each step reads them again.
template <class Access>
__global__ void __launch_bounds__(kRowThreads) norm_long_rows(Norm p, TeamShape shape) {
  using T = typename Access::T;
  using C = Compute<T>;
  using Item = typename Access::Item;
  constexpr int kLanes = Access::kLanes;
  __shared__ TeamStorage<C, 2> storage;
  wait_for_previous_kernel();
  Team<C, 2> team(shape, storage);
  const int64_t row = team.first() + team.index();
  const bool inside = row < p.rows;
  const T* x = static_cast<const T*>(p.x) + row * p.x_row_stride;
  const T* residual = static_cast<const T*>(p.residual) + row * p.residual_row_stride;
  T* sum = static_cast<T*>(p.sum) + row * p.columns;
  T* y = static_cast<T*>(p.y) + row * p.columns;
  const Access access(x, inside ? static_cast<int>(p.columns) : 0);

  const auto load = [&](int vector) {
    const int column = access.column(vector);
    Item item = access.load(x, column);
    if (p.residual == nullptr) return item;
    const Item other = access.load(residual, column);
#pragma unroll
    for (int i = 0; i < kLanes; ++i)
      item.lane[i] = convert<T>(convert<C>(item.lane[i]) + convert<C>(other.lane[i]));
    return item;
  };
  const RowPasses<kFewItems, decltype(load)> passes(load, team.rank(), team.size(),
                                                    inside ? access.vectors() : 0);
  team.init_barriers();
  const C count = static_cast<C>(p.columns);
  C mean = 0;
  if (p.centered) {
    C total[1] = {};
    passes.each([&](const Item& item, int) {
#pragma unroll
      for (int i = 0; i < kLanes; ++i) total[0] += convert<C>(item.lane[i]);
    });
    team.reduce(total, Sum{});
    mean = total[0] / count;
  }
  C moments[2] = {};
  passes.each([&](const Item& item, int vector) {
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      if (!access.has(access.column(vector), i)) continue;
      const C from_mean = convert<C>(item.lane[i]) - mean;
      moments[0] += from_mean * from_mean;
      moments[1] += from_mean;
    }
  });
  team.reduce(moments, Sum{});
  const C rest = p.centered ? moments[1] / count : C(0);
  const C rstd = rsqrt(moments[0] / count - rest * rest + static_cast<C>(p.eps));
  if (inside && team.rank() == 0) {
    if (p.mean != nullptr) static_cast<C*>(p.mean)[row] = mean + rest;
    if (p.rstd != nullptr) static_cast<C*>(p.rstd)[row] = rstd;
  }
  passes.each([&](const Item& item, int vector) {
    const int column = access.column(vector);
    C weight[kLanes], bias[kLanes], result[kLanes];
    load_affine(p, access, column, weight, bias);
#pragma unroll
    for (int i = 0; i < kLanes; ++i)
      result[i] = (convert<C>(item.lane[i]) - mean - rest) * rstd * weight[i] + bias[i];
    access.save(y, column, result);
    if (p.residual != nullptr) {
#pragma unroll
      for (int i = 0; i < kLanes; ++i) result[i] = convert<C>(item.lane[i]);
      access.save(sum, column, result);
    }
  });
}

template <class Tile, class W>
Status start(const Norm& p, const TeamShape& team, CUstream_st* stream) {
  Grid grid;
  const Status status = make_grid(team, p.rows, grid);
  if (!status.ok()) return status;
  return p.centered ? launch_overlapped(norm_rows<Tile, W, true>, grid, stream, p, team)
                    : launch_overlapped(norm_rows<Tile, W, false>, grid, stream, p, team);
}

template <class T>
Status run(const Norm& p, Alignment alignment, CUstream_st* stream) {
  const bool plain = p.weight == nullptr || (p.centered && p.bias == nullptr);
  const auto in_registers = [&](auto tag, const TeamShape& team) {
    using Tile = typename decltype(tag)::type;
    if (plain) return start<Tile, void>(p, team, stream);
    return with_parameter_type<T>(p.weight_dtype, [&](auto parameter) {
      return start<Tile, typename decltype(parameter)::type>(p, team, stream);
    });
  };
  const auto streamed = [&](auto tag, const TeamShape& team) {
    using Access = typename decltype(tag)::type;
    Grid grid;
    const Status status = make_grid(team, p.rows, grid);
    if (!status.ok()) return status;
    return launch_overlapped(norm_long_rows<Access>, grid, stream, p, team);
  };
  return with_tile<T>(alignment, p.columns, 1, kRowThreads, in_registers, streamed);
}

}  // namespace

Status norm(const Norm& p, CUstream_st* stream) {
  if (p.rows == 0 || p.columns == 0) return {};
  if (p.columns > kMostColumns) return {kTooLong};
  const TensorRows tensors[] = {{p.x, p.x_row_stride},
                                {p.residual, p.residual_row_stride},
                                {p.sum, p.columns},
                                {p.y, p.columns}};
  Alignment alignment = alignment_of(tensors, p.dtype, p.rows, p.columns);
  if (!aligned(p.weight, kVectorBytes) || !aligned(p.bias, kVectorBytes))
    alignment = Alignment::scalar;
  return dispatch_floating(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return run<T>(p, alignment, stream);
  });
}

}  // namespace torchkiln::cuda
