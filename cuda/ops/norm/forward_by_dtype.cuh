#pragma once

// Forward pass of rows that fit in the registers of a team: each element is read once.
//
// Layer norm needs the mean before the squares, which would take two exchanges between the warps of
// a team. Instead each warp uses a mean of its own, and one exchange merges the results:
//
//   warp w      n  elements of the warp
//               c  their mean, rounded                        shuffles in the warp
//               q  sum of (z - c)^2
//               s  sum of (z - c), lost by rounding c         shuffles in the warp
//                       |
//               [ n c q s ] of every warp in shared memory, one barrier
//                       |
//   every warp  mean = sum of n c / columns                   over the warps
//               d = c - mean
//               sum of (z - mean)^2 = sum of (q + n d^2 + 2 d s)
//
// Squares are always taken around a near mean, so a large mean costs no digits. RMS norm needs only
// the sum of squares.
//
// Half precision saves a pass over the elements. It takes q and s around the mean of one vector, at
// a distance d from c, then subtracts n d^2 from q and moves c by d = s / n. The variance of the
// warp is at least about d^2 / n, so the relative error is at most about n rounding errors.
//
// A quantised result replaces the row in the registers: adjacent lanes have adjacent vectors, so
// that the lanes of a warp share the scales (detail/fp8/block.cuh).

#include "detail/fp8/block.cuh"
#include "forward_common.cuh"
#include "launch.cuh"

namespace torchkiln::cuda {

using namespace device;
using namespace rowwise;
namespace {

/// Prefetches the parameters, which are read after the reduction, into L2 if there are too few rows
/// to hide that latency. A prefetch need not wait for a kernel that may write the parameters.
template <class Tile, class W>
__device__ __forceinline__ void prefetch_parameters(const Norm& p, const Tile& tile) {
  constexpr int64_t kPrefetchedRows = 256;
  if (p.rows > kPrefetchedRows) return;
#pragma unroll
  for (int k = 0; k < Tile::kItems; ++k) {
    if (!tile.has_any(k)) continue;
    prefetch_to_l2(static_cast<const W*>(p.weight) + tile.column(k));
    if (p.centered) prefetch_to_l2(static_cast<const W*>(p.bias) + tile.column(k));
  }
}

/// The tile of rows that are quantised: a group of threads has kManyItems adjacent blocks of
/// kScaledElements columns.
template <class T, bool kWhole>
using QuantizedTile = RowTile<RowVectors<T, kVectorLanes<T>, true>, kManyItems,
                              kScaledElements / kVectorLanes<T>, kWhole>;

/// Whether the rows of this tile are plain: see QuantizedPlan::is_plain.
template <class Tile>
inline constexpr bool is_plain = false;
template <class T>
inline constexpr bool is_plain<QuantizedTile<T, true>> = true;

/// Maximum number of threads per block.
template <bool kQuantized>
inline constexpr int kThreads = kQuantized ? kQuantizedThreads : kRowThreads;
template <class Tile, bool kQuantized>
inline constexpr int kBlocks = kQuantized ? kQuantizedBlocks : kRowBlocks<Tile>;

/// Reads a row into the registers of a team, computes mean and variance, and writes the result. W:
/// the type of weight and, for layer norm, bias; void if one of them is missing.
template <class Tile, class W, bool kCentered, bool kQuantized>
__global__ void __launch_bounds__(kThreads<kQuantized>, kBlocks<Tile, kQuantized>)
    norm_rows(Norm p, TeamShape shape) {
  using T = typename Tile::T;
  using C = Compute<T>;
  constexpr int kLanes = Tile::kLanes;
  constexpr int kItems = Tile::kItems;
  constexpr int kPublished = kCentered ? (sizeof(T) > 2 ? 4 : 3) : 1;
  constexpr bool kAffine = !std::is_void_v<W>;
  constexpr bool kPlain = is_plain<Tile>;
  __shared__ TeamStorage<C, kPublished> storage;
  constexpr bool kPrefetches = kAffine && Tile::kVectors <= kFewItems;  // larger tiles would spill
  if (!kPrefetches) wait_for_previous_kernel();
  Team<C, kPublished> team(shape, storage);
  const int64_t row = team.first_team() + team.index();
  const bool inside = row < p.rows;
  const T* x = static_cast<const T*>(p.x) + row * p.x_row_stride;
  const Tile tile(x, inside ? static_cast<int>(p.columns) : 0, team.rank(), team.size());
  if constexpr (kPrefetches) {
    prefetch_parameters<Tile, W>(p, tile);
    wait_for_previous_kernel();
  }
  typename Tile::Item items[kItems];
  tile.load(x, items);
  if (p.residual != nullptr) {
    typename Tile::Item others[kItems];
    with_residual<T>(p, inside ? row : 0, [&](auto* residual) {
      if constexpr (std::is_same_v<decltype(residual), const T*>) {
        tile.load(residual, others);
      } else {
        constexpr bool kVectors = Tile::lanes(kItems - 1) == kLanes;
#pragma unroll
        for (int k = 0; k < kItems; ++k) {
          C other[kLanes] = {};
          if constexpr (kVectors) {
            if (tile.has_any(k)) tile.load_parameters(k, residual, other);
          }
#pragma unroll
          for (int i = 0; i < Tile::lanes(k); ++i) {
            if (!kVectors && tile.has(k, i)) other[i] = convert<C>(residual[tile.column(k) + i]);
            others[k].lane[i] = other[i];
          }
        }
      }
    });
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

  // Step 1: count and mean of each warp.
  constexpr bool kCorrectsMean = kCentered && sizeof(T) > 2;
  constexpr bool kTakesMean = kCorrectsMean || Tile::lanes(0) == 1;
  const C inverse_columns = C(1) / static_cast<C>(p.columns);
  C count = 0, center = 0;
  if constexpr (kCentered) {
    const int lanes = min(team.size(), kWarpLanes);
    count = static_cast<C>(tile.count_of_lanes(team.rank() & (lanes - 1), lanes));
    if constexpr (kTakesMean) {
      C total[1] = {};
#pragma unroll
      for (int k = 0; k < kItems; ++k) {
        C z[kLanes];
        widen(items[k], z);
#pragma unroll
        for (int i = 0; i < Tile::lanes(k); ++i) total[0] += z[i];
      }
      force_reconversion(items);
      team.reduce_in_warp(total, Sum{});
      center = count > 0 ? total[0] / count : C(0);
    } else {
      // The mean of a vector. Around a single element, the sum of squares could be four times as
      // large.
      C z[kLanes], sum = 0;
      widen(items[0], z);
#pragma unroll
      for (int i = 0; i < Tile::lanes(0); ++i) sum += z[i];
      const C edge = convert<C>(items[kItems - 1].lane[0]);
      const C near = tile.has_any(0) ? sum * (C(1) / Tile::lanes(0)) : edge;
      center = __shfl_sync(~0u, near, 0, lanes);
    }
  }
  // Step 2: moments around the center.
  C warp_moments[kCentered ? 2 : 1] = {};
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    C z[kLanes];
    widen(items[k], z);
    // A missing item holds zeros; centre it at 0 so that it adds nothing.
    const C from = tile.has_any(k) ? center : C(0);
#pragma unroll
    for (int i = 0; i < Tile::lanes(k); ++i) {
      const C distance = kCentered ? z[i] - from : z[i];
      warp_moments[0] += distance * distance;
      if constexpr (kCentered) warp_moments[1] += distance;
    }
  }
  force_reconversion(items);
  team.reduce_in_warp(warp_moments, Sum{});
  if constexpr (kCentered && !kTakesMean) {
    const C shift = count > 0 ? warp_moments[1] / count : C(0);
    center += shift;
    warp_moments[0] -= shift * warp_moments[1];
  }
  // Step 3: merge the warps.
  C mean = 0, variance, remainder = 0;
  if constexpr (kCorrectsMean) {
    const C published[kPublished] = {count, center, warp_moments[0], warp_moments[1]};
    using Published = const C(&)[kPublished];
    team.publish(published);
    C total[1];
    team.reduce_published(published, total, Sum{},
                          [](Published warp, C(&to)[1]) { to[0] = warp[0] * warp[1]; });
    mean = total[0] * inverse_columns;
    C moments[2];
    team.reduce_published(published, moments, Sum{}, [mean](Published warp, C(&to)[2]) {
      const C distance = warp[1] - mean;
      to[0] = warp[2] + warp[0] * distance * distance + C(2) * distance * warp[3];
      to[1] = warp[3] + warp[0] * distance;
    });
    remainder = moments[1] * inverse_columns;
    variance = moments[0] * inverse_columns - remainder * remainder;
  } else if constexpr (kCentered) {
    // Half precision has digits to spare: one pass over the warps, with distances from the mean of
    // the first warp. The term that cancels in the variance is at most the number of warps times
    // the variance.
    const C published[kPublished] = {count, center, warp_moments[0]};
    using Published = const C(&)[kPublished];
    team.publish(published);
    const C from = team.first_published(published, 1);
    C moments[2];
    team.reduce_published(published, moments, Sum{}, [from](Published warp, C(&to)[2]) {
      const C distance = warp[1] - from;
      to[0] = warp[0] * distance;
      to[1] = warp[2] + to[0] * distance;
    });
    const C shift = moments[0] * inverse_columns;
    mean = from + shift;
    variance = moments[1] * inverse_columns - shift * shift;
    if (variance < C(0)) variance = 0;  // negative by rounding; NaN is kept
  } else {
    team.reduce_warps(warp_moments, Sum{});
    variance = warp_moments[0] * inverse_columns;
  }
  const C rstd = rsqrt(variance + static_cast<C>(p.eps));
  if (inside && team.rank() == 0) {
    if (kCentered && p.mean != nullptr) static_cast<C*>(p.mean)[row] = mean + remainder;
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
      if constexpr (kCentered) z[i] -= mean;
      if constexpr (kCorrectsMean) z[i] -= remainder;
      z[i] *= rstd;
    }
    if constexpr (!kPlain) round_normalized<T>(p, z);
#pragma unroll
    for (int i = 0; i < Tile::lanes(k); ++i) {
      if constexpr (kAffine && !kPlain) weight[i] += static_cast<C>(p.weight_offset);
      z[i] *= weight[i];
      if constexpr (kCentered) z[i] += bias[i];
    }
    if constexpr (kQuantized) {
#pragma unroll
      for (int i = 0; i < kLanes; ++i) items[k].lane[i] = convert<T>(z[i]);
    } else {
      tile.save(inside, static_cast<T*>(p.y) + row * p.columns, k, z);
    }
  }
  if constexpr (kQuantized) {
    force_reconversion(items);
    using Blocks = fp8::LaneBlocks<T, kLanes, kItems>;
    uint8_t* const data = p.data + row * p.columns;
    const float scale = Blocks::quantize(
        items, [&](int k) { return tile.has_any(k); },
        [&](int k, const auto& bytes) {
          *reinterpret_cast<std::decay_t<decltype(bytes)>*>(data + tile.column(k)) = bytes;
        });
    const int block = tile.column(Blocks::own()) / kScaledElements;
    if (inside && Blocks::is_first() && block * kScaledElements < p.columns)
      p.scale[block * p.rows + row] = scale;
  }
}

template <class Tile, class W, bool kQuantized>
Status launch_one_pass(const Norm& p, const TeamShape& team, CUstream_st* stream) {
  Grid grid;
  const Status status = make_grid(team, p.rows, grid);
  if (!status.ok()) return status;
  return p.centered
             ? launch_overlapped(norm_rows<Tile, W, true, kQuantized>, grid, stream, p, team)
             : launch_overlapped(norm_rows<Tile, W, false, kQuantized>, grid, stream, p, team);
}

template <class Tile, bool kQuantized>
Status launch_with_parameters(const Norm& p, const TeamShape& team, CUstream_st* stream) {
  if constexpr (!is_plain<Tile>) {
    if (p.weight == nullptr || (p.centered && p.bias == nullptr))
      return launch_one_pass<Tile, void, kQuantized>(p, team, stream);
  }
  return with_parameter_type<typename Tile::T>(p.weight_dtype, [&](auto parameter) {
    using W = typename decltype(parameter)::type;
    return launch_one_pass<Tile, W, kQuantized>(p, team, stream);
  });
}

}  // namespace

template <class T>
Status NormForwardByDtype<T>::launch(const Norm& p, const OnePassPlan& plan, CUstream_st* stream) {
  return with_tile<T>(plan.alignment, plan.rows, [&](auto tag, const TeamShape& team) {
    return launch_with_parameters<typename decltype(tag)::type, false>(p, team, stream);
  });
}

template <class T>
Status NormForwardByDtype<T>::launch(const Norm& p, const QuantizedPlan& plan,
                                     CUstream_st* stream) {
  if constexpr (sizeof(T) <= 4) {
    return plan.is_plain
               ? launch_with_parameters<QuantizedTile<T, true>, true>(p, plan.team, stream)
               : launch_with_parameters<QuantizedTile<T, false>, true>(p, plan.team, stream);
  } else {
    return {"float64 has no quantised form"};
  }
}

}  // namespace torchkiln::cuda
