// grad_x = (grad - sum of (grad * y)) * y * scale over a dimension, or the gradient of log-softmax,
// with the plans of forward.cu. Two tensors are read, so the longest row of a team has half the
// length.
//
//   plan        kernel                     when
//   registers   rows_in_registers          adjacent elements, rows that a team of threads holds
//   parts       rows_in_parts              adjacent elements, longer rows
//   short       softmax_short_rows         up to 96 bytes that are not whole vectors, or few
//                                          rows, without a mask (short.cuh); softmax_singles for
//                                          1 element
//   columns     softmax_backward_columns   elements that are not adjacent (strided.cuh)

#include "rows.cuh"

namespace torchkiln::cuda {
namespace {

/// The elements of a row that one thread holds. The members are those of SoftmaxRow.
template <class Tile_, bool kLog, bool kMasked>
class SoftmaxGradientRow {
 public:
  using Problem = SoftmaxBackward;
  using Tile = Tile_;
  using T = typename Tile::T;
  using C = Compute<T>;
  using Op = Sum;
  static constexpr int kValues = 1;

  __device__ __forceinline__ SoftmaxGradientRow(const SoftmaxBackward& p, int64_t row, int rank,
                                                int size)
      : p_(p),
        row_(row),
        inside_(row < p.outer),
        grad_x_(static_cast<T*>(p.grad_x) + row * p.length),
        tile_(grad_x_, inside_ ? static_cast<int>(p.length) : 0, rank, size) {}

  __device__ __forceinline__ void load() {
    tile_.load(static_cast<const T*>(p_.grad) + row_ * p_.outer_stride, grads_);
    tile_.load(static_cast<const T*>(p_.y) + row_ * p_.length, ys_);
  }

  template <class Team>
  __device__ __forceinline__ void reduce(Team& team, C (&total)[kValues]) const {
    total[0] = 0;
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      C g[kLanes], y[kLanes];
      widen(grads_[k], g);
      widen(ys_[k], y);
#pragma unroll
      for (int i = 0; i < Tile::lanes(k); ++i) total[0] += is_log() ? g[i] : g[i] * y[i];
    }
    team.reduce_in_warp(total, Sum{});
  }

  __device__ __forceinline__ void write(const C (&total)[kValues]) {
    ActiveLanes<kMasked, Tile> active;
    active.read(tile_, p_.mask, row_);
    const C scale = static_cast<C>(p_.scale);
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      C g[kLanes], y[kLanes];
      widen(grads_[k], g);
      widen(ys_[k], y);
#pragma unroll
      for (int i = 0; i < Tile::lanes(k); ++i) {
        g[i] = is_log() ? gradient<true>(g[i], y[i], total[0], scale, MathFor<T>::exp(y[i]))
                        : gradient<false>(g[i], y[i], total[0], scale, C(0));
        if (kMasked && !active.has(tile_, k, i)) g[i] = 0;
      }
      tile_.save(inside_, grad_x_, k, g);
    }
  }

 private:
  static constexpr int kLanes = Tile::kLanes;
  static constexpr int kItems = Tile::kItems;

  __device__ __forceinline__ bool is_log() const { return kMasked ? p_.log : kLog; }

  const SoftmaxBackward& p_;
  int64_t row_;
  bool inside_;
  T* grad_x_;
  Tile tile_;
  typename Tile::Item grads_[kItems], ys_[kItems];
};

}  // namespace

Status softmax_backward(const SoftmaxBackward& p, Allocate allocate, CUstream_st* stream) {
  return launch_rows</*kStreams=*/2>(
      p,
      [](auto tile, auto log, auto masked) {
        using Tile = typename std::decay_t<decltype(tile)>::type;
        return TypeTag<SoftmaxGradientRow<Tile, log, masked>>{};
      },
      [](auto type, auto log) {
        return softmax_backward_columns<typename std::decay_t<decltype(type)>::type, log>;
      },
      allocate, stream);
}

}  // namespace torchkiln::cuda
