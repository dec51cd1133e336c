// y = softmax(x * scale), or its logarithm, over a dimension, with a mask.
//
//   plan        kernel              when
//   registers   rows_in_registers   adjacent elements, rows that a team of threads holds: part of
//                                   a warp, a block of up to 512 threads, or a cluster on 9.0
//   parts       rows_in_parts       adjacent elements, longer rows: read twice, the second time
//                                   from the L2 cache (detail/rowwise/parts.cuh)
//   tile        softmax_tile        elements that are not adjacent in x but in y, without a mask:
//                                   adjacent rows in shared memory (tile.cuh)
//   short       softmax_short_rows  up to 96 bytes that are not whole vectors, or few rows, without
//                                   a mask (short.cuh); softmax_singles for 1 element
//   columns     softmax_columns     elements that are not adjacent, read three times (strided.cuh)
//
// choose.h makes the plan of both directions, rows.cuh launches it. Gradients: backward.cu.

#include "detail/rowwise/online_softmax.cuh"
#include "rows.cuh"

namespace torchkiln::cuda {
namespace {

/// The elements of a row that one thread holds. Without kMasked there is no mask, and
/// keeps_order(scale) holds. With kMasked, p.log is read at run time, which saves instantiations.
template <class Tile_, bool kLog, bool kMasked>
class SoftmaxRow {
 public:
  using Problem = Softmax;
  using Tile = Tile_;
  using T = typename Tile::T;
  using C = Compute<T>;
  using Math = MathFor<T>;
  using Op = SumOfExponentials<Math>;
  static constexpr int kValues = 2;  // maximum, sum of exp(x - maximum)

  __device__ __forceinline__ SoftmaxRow(const Softmax& p, int64_t row, int rank, int size)
      : p_(p),
        row_(row),
        inside_(row < p.outer),
        y_(static_cast<T*>(p.y) + row * p.length),
        tile_(y_, inside_ ? static_cast<int>(p.length) : 0, rank, size) {}

  __device__ __forceinline__ void load() {
    tile_.load(static_cast<const T*>(p_.x) + row_ * p_.outer_stride, items_, T(kExcluded));
    active_.read(tile_, p_.mask, row_);
  }

  template <class Team>
  __device__ __forceinline__ void reduce(Team& team, C (&values)[kValues]) {
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
      largest[0] = max_of<C>(items_);
    }
    force_reconversion(items_);
    largest[0] *= unit();
    team.reduce_in_warp(largest, Max{});
    // Exponentials are relative to a maximum, so that large numbers lose no digits. Here it is the
    // maximum of the warp, so that one exchange between warps is enough.
    warp_largest_ = largest[0];
    const C reference = Op::reference(warp_largest_);
    C sum[1] = {};
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      C z[kLanes];
      read(k, z);
#pragma unroll
      for (int i = 0; i < Tile::lanes(k); ++i) {
        const C term = Math::exp(z[i] * unit() - reference);
        sum[0] += term;
        if constexpr (kKeeps) terms_[k][i] = term;
      }
    }
    force_reconversion(items_);
    team.reduce_in_warp(sum, Sum{});
    values[0] = warp_largest_;
    values[1] = sum[0];
  }

  __device__ __forceinline__ void write(const C (&values)[kValues]) {
    const bool is_log = kMasked ? p_.log : kLog;
    // A row without an unmasked element becomes NaN, as in torch: 0 / 0, or -infinity + infinity.
    const C reference = Op::reference(values[0]);
    const C factor = (kKeeps ? Op::rescaled(C(1), warp_largest_, values[0]) : C(1)) / values[1];
    const C log_sum = is_log ? log(values[1]) : C(0);
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      C z[kLanes];
      read(k, z);
#pragma unroll
      for (int i = 0; i < Tile::lanes(k); ++i) {
        if constexpr (kKeeps) {
          z[i] = terms_[k][i] * factor;
        } else if (is_log) {
          z[i] = (z[i] * unit() - reference) - log_sum;
        } else {
          z[i] = Math::exp(z[i] * unit() - reference) * factor;
        }
      }
      tile_.save(inside_, y_, k, z);
    }
  }

 private:
  static constexpr int kLanes = Tile::kLanes;
  static constexpr int kItems = Tile::kItems;
  // Whether the registers have room to keep the exponentials for the results.
  static constexpr bool kKeeps = !kLog && !kMasked && Tile::kVectors == kFewItems;

  /// The scale of the numbers that read() returns. It is positive, so that -infinity times it is
  /// -infinity.
  __device__ __forceinline__ C unit() const { return kMasked ? C(1) : static_cast<C>(p_.scale); }
  __device__ __forceinline__ void read(int k, C (&z)[kLanes]) const {
    widen(items_[k], z);
    if constexpr (kMasked) {
#pragma unroll
      for (int i = 0; i < Tile::lanes(k); ++i)
        z[i] = active_.has(tile_, k, i) ? z[i] * static_cast<C>(p_.scale) : C(kExcluded);
    }
  }

  const Softmax& p_;
  int64_t row_;
  bool inside_;
  T* y_;
  Tile tile_;
  typename Tile::Item items_[kItems];
  ActiveLanes<kMasked, Tile> active_;
  C warp_largest_;
  C terms_[kKeeps ? kItems : 1][kLanes];
};

}  // namespace

Status softmax(const Softmax& p, Allocate allocate, CUstream_st* stream) {
  return launch_rows</*kStreams=*/1>(
      p,
      [](auto tile, auto log, auto masked) {
        return TypeTag<SoftmaxRow<typename std::decay_t<decltype(tile)>::type, log, masked>>{};
      },
      [](auto type, auto log) {
        return softmax_columns<typename std::decay_t<decltype(type)>::type, log>;
      },
      allocate, stream);
}

}  // namespace torchkiln::cuda
