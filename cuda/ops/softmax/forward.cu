#include "detail/rowwise/online_softmax.cuh"
#include "rows.cuh"

namespace torchkiln::cuda {
namespace {

/// A team reads a row into registers, computes its maximum and the sum of its exponentials, and
/// writes the result. Without kMasked there is no mask and the scale is an ordinary number; with
/// it, p.log is read at run time, which saves instantiations.
template <class Tile, bool kLog, bool kMasked>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks<Tile>)
    softmax_rows(Softmax p, TeamShape shape) {
  using T = typename Tile::T;
  using C = Compute<T>;
  using Math = MathFor<T>;
  using Sums = SumOfExponentials<Math>;
  const bool is_log = kMasked ? p.log : kLog;
  constexpr int kLanes = Tile::kLanes;
  constexpr int kItems = Tile::kItems;
  __shared__ TeamStorage<C, 2> storage;
  wait_for_previous_kernel();
  Team<C, 2> team(shape, storage);
  const int64_t row = team.first_team() + team.index();
  const bool inside = row < p.outer;
  const T* x = static_cast<const T*>(p.x) + row * p.outer_stride;
  const Tile tile(x, inside ? static_cast<int>(p.length) : 0, team.rank(), team.size());
  typename Tile::Item items[kItems];
  tile.load(x, items, T(kExcluded));
  team.init_barriers();
  const ActiveLanes<kMasked, Tile> active(tile, p.mask, row);
  const C scale = static_cast<C>(p.scale);
  // The scale of the numbers that read() returns. It is positive, so that -infinity stays
  // -infinity.
  const C unit = kMasked ? C(1) : scale;
  const auto read = [&](int k, C(&z)[kLanes]) {
    widen(items[k], z);
    if constexpr (kMasked) {
#pragma unroll
      for (int i = 0; i < Tile::lanes(k); ++i)
        z[i] = active.has(k, i) ? z[i] * scale : C(kExcluded);
    }
  };

  C largest[1];
  if constexpr (kMasked) {
    largest[0] = C(kExcluded);
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      C z[kLanes];
      read(k, z);
#pragma unroll
      for (int i = 0; i < Tile::lanes(k); ++i) largest[0] = fmax(largest[0], z[i]);
    }
  } else {
    largest[0] = max_of<C>(items);
  }
  force_reconversion(items);
  largest[0] *= unit;
  team.reduce_in_warp(largest, Max{});
  // Exponentials are relative to the maximum, so that large numbers lose no digits; here to the
  // maximum of the warp, so that one exchange between warps is enough. They are kept for the
  // results if the registers have room.
  constexpr bool kKeepsTerms = !kLog && !kMasked && Tile::kVectors == kFewItems;
  C terms[kKeepsTerms ? kItems : 1][kLanes];
  const C warp_reference = Sums::reference(largest[0]);
  C warp_sum[1] = {};
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    C z[kLanes];
    read(k, z);
#pragma unroll
    for (int i = 0; i < Tile::lanes(k); ++i) {
      const C term = Math::exp(z[i] * unit - warp_reference);
      warp_sum[0] += term;
      if constexpr (kKeepsTerms) terms[k][i] = term;
    }
  }
  force_reconversion(items);
  team.reduce_in_warp(warp_sum, Sum{});
  C sums[2] = {largest[0], warp_sum[0]};
  team.reduce_warps(sums, Sums{});
  // A row without any unmasked element is NaN, as in torch: 0 / 0, or -infinity + infinity.
  const C reference = Sums::reference(sums[0]);
  const C factor = (kKeepsTerms ? Sums::rescaled(C(1), largest[0], sums[0]) : C(1)) / sums[1];
  const C log_sum = is_log ? log(sums[1]) : C(0);
  T* y = static_cast<T*>(p.y) + row * p.length;
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    C z[kLanes];
    read(k, z);
#pragma unroll
    for (int i = 0; i < Tile::lanes(k); ++i) {
      if constexpr (kKeepsTerms) {
        z[i] = terms[k][i] * factor;
      } else if (is_log) {
        z[i] = (z[i] * unit - reference) - log_sum;
      } else {
        z[i] = Math::exp(z[i] * unit - reference) * factor;
      }
    }
    tile.save(inside, y, k, z);
  }
}

}  // namespace

Status softmax(const Softmax& p, CUstream_st* stream) {
  const TensorRows tensors[] = {{p.x, p.outer_stride}, {p.y, p.length}};
  // Scaling must keep the order of numbers, and -infinity.
  const bool plain_scale = p.scale > 1e-30 && p.scale < 1e30;
  return queue(
      p, tensors, p.mask.any() || !plain_scale,
      [](auto tile, auto log, auto masked) {
        return softmax_rows<typename std::decay_t<decltype(tile)>::type, log, masked>;
      },
      [](auto type, auto log) {
        return softmax_columns<typename std::decay_t<decltype(type)>::type, log>;
      },
      stream);
}

}  // namespace torchkiln::cuda
