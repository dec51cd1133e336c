#include "detail/rowwise/online_softmax.cuh"
#include "detail/rowwise/tile.cuh"
#include "strided.cuh"

namespace torchkiln::cuda {
namespace {

/// A bit for each lane of each of a thread's items that belongs to the row and takes part.
template <bool kMasked, class Tile>
class Parts {
 public:
  __device__ __forceinline__ Parts(const Tile& tile, const RowMask& mask, int64_t row)
      : tile_(tile) {
    if constexpr (kMasked) {
      const MaskRow mask_row(mask, row);
#pragma unroll
      for (int k = 0; k < Tile::kItems; ++k) {
        bits_[k] = 0;
#pragma unroll
        for (int i = 0; i < Tile::lanes(k); ++i) {
          if (tile.has(k, i) && mask_row.takes(tile.column(k) + i)) bits_[k] |= 1u << i;
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

/// A team reads a row, and with all of it in registers finds its maximum and the sum of its
/// exponentials, and writes it. Without kMasked all takes part, and the scale is plain; with it,
/// the problem tells whether a logarithm is wanted.
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
  const int64_t row = team.first() + team.index();
  const bool inside = row < p.outer;
  const T* x = static_cast<const T*>(p.x) + row * p.outer_stride;
  const Tile tile(x, inside ? static_cast<int>(p.length) : 0, team.rank(), team.size());
  typename Tile::Item items[kItems];
  tile.load(x, items, T(kNothing));
  team.init_barriers();
  const Parts<kMasked, Tile> parts(tile, p.mask, row);
  const C scale = static_cast<C>(p.scale);
  // Of a number that read() gives. -infinity stays what it is.
  const C unit = kMasked ? C(1) : scale;
  const auto read = [&](int k, C(&z)[kLanes]) {
    widen(items[k], z);
    if constexpr (kMasked) {
#pragma unroll
      for (int i = 0; i < Tile::lanes(k); ++i) z[i] = parts.has(k, i) ? z[i] * scale : C(kNothing);
    }
  };

  C largest[1];
  if constexpr (kMasked) {
    largest[0] = C(kNothing);
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      C z[kLanes];
      read(k, z);
#pragma unroll
      for (int i = 0; i < Tile::lanes(k); ++i) largest[0] = fmax(largest[0], z[i]);
    }
  } else {
    largest[0] = largest_of<C>(items);
  }
  widen_anew(items);
  largest[0] *= unit;
  team.reduce_in_warp(largest, Max{});
  // Relative to the largest: numbers far from zero lose no digits. A warp takes its own, so that
  // warps meet once. Exponentials are kept for the results where the registers have room for them.
  constexpr bool kKeeps = !kLog && !kMasked && Tile::kVectors == kFewItems;
  C terms[kKeeps ? kItems : 1][kLanes];
  const C from = Sums::reference(largest[0]);
  C part[1] = {};
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    C z[kLanes];
    read(k, z);
#pragma unroll
    for (int i = 0; i < Tile::lanes(k); ++i) {
      const C term = Math::exp(z[i] * unit - from);
      part[0] += term;
      if constexpr (kKeeps) terms[k][i] = term;
    }
  }
  widen_anew(items);
  team.reduce_in_warp(part, Sum{});
  C sums[2] = {largest[0], part[0]};
  team.reduce_warps(sums, Sums{});
  // A row in which nothing takes part is NaN, as in torch: 0 / 0, or -infinity + infinity.
  const C reference = Sums::reference(sums[0]);
  const C factor = (kKeeps ? Sums::rescaled(C(1), largest[0], sums[0]) : C(1)) / sums[1];
  const C log_sum = is_log ? log(sums[1]) : C(0);
  T* y = static_cast<T*>(p.y) + row * p.length;
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    C z[kLanes];
    read(k, z);
#pragma unroll
    for (int i = 0; i < Tile::lanes(k); ++i) {
      if constexpr (kKeeps) {
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
  const int64_t row = team.first() + team.index();
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
  const Parts<kMasked, Tile> parts(tile, p.mask, row);
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
      if (kMasked && !parts.has(k, i)) g[i] = 0;
    }
    tile.save(inside, grad_x, k, g);
  }
}

/// Calls body(log, masked) with the two as types: where it is masked, a type for both.
template <class Body>
Status with_kind(bool is_log, bool is_masked, const Body& body) {
  if (is_masked) return body(std::false_type{}, std::true_type{});
  return is_log ? body(std::true_type{}, std::false_type{})
                : body(std::false_type{}, std::false_type{});
}

/// Queues rows(place, log, masked) where a team holds a row whose elements are adjacent, else
/// columns(type, log).
template <class Problem, int N, class RowKernel, class ColumnKernel>
Status queue(const Problem& p, const TensorRows (&tensors)[N], bool masked, const RowKernel& rows,
             const ColumnKernel& columns, CUstream_st* stream) {
  if (p.outer * p.length * p.inner == 0) return {};
  if (p.length > kMostColumns) return {kTooLong};
  const bool adjacent = p.inner == 1 && (p.stride == 1 || p.length == 1);
  return dispatch_floating(p.dtype, [&](auto tag) {
    using T = typename std::decay_t<decltype(tag)>::type;
    const auto by_columns = [&] {
      const int64_t blocks = ceil_div(p.outer * p.inner, kColumns);
      if (blocks > kMaxGridX) return Status{"too many rows for one launch"};
      const unsigned depth = p.length >= 1024 ? kMostRows : p.length >= 64 ? 8 : 2;
      const Grid grid{dim3(static_cast<unsigned>(blocks)), dim3(kColumns, depth)};
      return with_kind(p.log, false, [&](auto log, auto) {
        return launch_overlapped(columns(tag, log), grid, stream, p);
      });
    };
    if (!adjacent) return by_columns();
    const auto in_registers = [&](auto tile, const TeamShape& team) {
      Grid grid;
      const Status status = make_grid(team, p.outer, grid);
      if (!status.ok()) return status;
      return with_kind(p.log, masked, [&](auto log, auto is_masked) {
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
  // The order of numbers is that of their multiples, and -infinity stays what it is.
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
