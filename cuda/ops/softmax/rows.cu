#include "detail/rowwise/online_softmax.cuh"
#include "detail/rowwise/tile.cuh"
#include "strided.cuh"

namespace torchkiln::cuda {
namespace {

/// One bit per lane of each of a thread's items: the lane belongs to the row and is not masked.
template <bool kMasked, class Tile>
class ActiveLanes {
 public:
  __device__ __forceinline__ ActiveLanes(const Tile& tile, const RowMask& mask, int64_t row)
      : tile_(tile) {
    if constexpr (kMasked) {
      const MaskRow mask_row(mask, row);
#pragma unroll
      for (int k = 0; k < Tile::kItems; ++k) {
        bits_[k] = 0;
#pragma unroll
        for (int i = 0; i < Tile::lanes(k); ++i) {
          if (tile.has(k, i) && mask_row.allows(tile.column(k) + i)) bits_[k] |= 1u << i;
        }
      }
    }
  }

  __device__ __forceinline__ bool has(int k, int lane) const {
    if constexpr (kMasked) {
      return (bits_[k] >> lane & 1u) != 0;
    } else {
      return tile_.has(k, lane);
    }
  }

 private:
  const Tile& tile_;
  uint32_t bits_[kMasked ? Tile::kItems : 1];
};

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

template <class Tile, bool kLog, bool kMasked>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks<Tile, 2>)
    softmax_backward_rows(SoftmaxBackward p, TeamShape shape) {
  using T = typename Tile::T;
  using C = Compute<T>;
  using Math = MathFor<T>;
  const bool is_log = kMasked ? p.log : kLog;
  constexpr int kLanes = Tile::kLanes;
  constexpr int kItems = Tile::kItems;
  __shared__ TeamStorage<C, 1> storage;
  wait_for_previous_kernel();
  Team<C, 1> team(shape, storage);
  const int64_t row = team.first_team() + team.index();
  const bool inside = row < p.outer;
  const T* grad = static_cast<const T*>(p.grad) + row * p.outer_stride;
  const Tile tile(grad, inside ? static_cast<int>(p.length) : 0, team.rank(), team.size());
  typename Tile::Item grads[kItems], ys[kItems];
  tile.load(grad, grads);
  tile.load(static_cast<const T*>(p.y) + row * p.length, ys);
  team.init_barriers();
  const C scale = static_cast<C>(p.scale);

  C total[1] = {};
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    C g[kLanes], y[kLanes];
    widen(grads[k], g);
    widen(ys[k], y);
#pragma unroll
    for (int i = 0; i < Tile::lanes(k); ++i) total[0] += is_log ? g[i] : g[i] * y[i];
  }
  team.reduce(total, Sum{});
  const ActiveLanes<kMasked, Tile> active(tile, p.mask, row);
  T* grad_x = static_cast<T*>(p.grad_x) + row * p.length;
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    C g[kLanes], y[kLanes];
    widen(grads[k], g);
    widen(ys[k], y);
#pragma unroll
    for (int i = 0; i < Tile::lanes(k); ++i) {
      g[i] = is_log ? gradient<true>(g[i], y[i], total[0], scale, Math::exp(y[i]))
                    : gradient<false>(g[i], y[i], total[0], scale, C(0));
      if (kMasked && !active.has(k, i)) g[i] = 0;
    }
    tile.save(inside, grad_x, k, g);
  }
}

/// Calls body(log, masked) with both flags as types. Masked kernels read the log flag at run time.
template <class Body>
Status with_flags(bool is_log, bool is_masked, const Body& body) {
  if (is_masked) return body(std::false_type{}, std::true_type{});
  return is_log ? body(std::true_type{}, std::false_type{})
                : body(std::false_type{}, std::false_type{});
}

/// Queues rows(tile, log, masked) if the elements of a row are adjacent and a team can hold it,
/// else columns(type, log).
template <class Problem, int N, class RowKernel, class ColumnKernel>
Status queue(const Problem& p, const TensorRows (&tensors)[N], bool masked, const RowKernel& rows,
             const ColumnKernel& columns, CUstream_st* stream) {
  if (p.outer * p.length * p.inner == 0) return {};
  if (p.length > kMaxColumns) return {kTooLong};
  const bool adjacent = p.inner == 1 && (p.stride == 1 || p.length == 1);
  return dispatch_floating(p.dtype, [&](auto tag) {
    using T = typename std::decay_t<decltype(tag)>::type;
    const auto by_columns = [&] {
      const int64_t blocks = ceil_div(p.outer * p.inner, kColumns);
      if (blocks > kMaxGridX) return Status{"too many rows for one launch"};
      const unsigned depth = p.length >= 1024 ? kMaxRows : p.length >= 64 ? 8 : 2;
      const Grid grid{dim3(static_cast<unsigned>(blocks)), dim3(kColumns, depth)};
      return with_flags(p.log, false, [&](auto log, auto) {
        return launch_overlapped(columns(tag, log), grid, stream, p);
      });
    };
    if (!adjacent) return by_columns();
    const auto in_registers = [&](auto tile, const TeamShape& team) {
      Grid grid;
      const Status status = make_grid(team, p.outer, grid);
      if (!status.ok()) return status;
      return with_flags(p.log, masked, [&](auto log, auto is_masked) {
        return launch_overlapped(rows(tile, log, is_masked), grid, stream, p, team);
      });
    };
    const Alignment alignment = alignment_of(tensors, p.dtype, p.outer, p.length);
    return with_tile<T>(alignment, p.length, N - 1, kRowThreads / 2, in_registers,
                        [&](auto, auto) { return by_columns(); });
  });
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

Status softmax_backward(const SoftmaxBackward& p, CUstream_st* stream) {
  const TensorRows tensors[] = {{p.grad, p.outer_stride}, {p.y, p.length}, {p.grad_x, p.length}};
  return queue(
      p, tensors, p.mask.any(),
      [](auto tile, auto log, auto masked) {
        return softmax_backward_rows<typename std::decay_t<decltype(tile)>::type, log, masked>;
      },
      [](auto type, auto log) {
        return softmax_backward_columns<typename std::decay_t<decltype(type)>::type, log>;
      },
      stream);
}

}  // namespace torchkiln::cuda
