#pragma once

// The elements of a long row that a thread normalizes. Moments are taken around the mean of a warp,
// and merged around a common mean, so that a large mean loses no digits.

#include "detail/rowwise/parts.cuh"
#include "forward_common.cuh"

namespace torchkiln::cuda {

using namespace device;
using namespace rowwise;
namespace {

/// Operator over arrays {count, center, sum of (z - center)^2, sum of z - center}, where center is
/// near the mean of `count` numbers z.
struct MergeMoments {
  template <class C, int N>
  static __device__ __forceinline__ void clear(C (&a)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) a[i] = C(0);
  }
  template <class C>
  __device__ __forceinline__ void operator()(C (&a)[4], const C (&b)[4]) const {
    const C count = a[0] + b[0];
    if (count == C(0)) return;
    const C center = a[1] + (b[1] - a[1]) * (b[0] / count);
    // Distances of the common center, as it is rounded, from those of both parts.
    const C from_a = center - a[1];
    const C from_b = center - b[1];
    a[2] += from_a * (a[0] * from_a - C(2) * a[3]) + b[2] + from_b * (b[0] * from_b - C(2) * b[3]);
    a[3] += b[3] - a[0] * from_a - b[0] * from_b;
    a[1] = center;
    a[0] = count;
  }
};

template <class Tile_, bool kCentered>
class NormPart {
 public:
  using Problem = Norm;
  using Tile = Tile_;
  using T = typename Tile::T;
  using C = Compute<T>;
  using Op = std::conditional_t<kCentered, MergeMoments, Sum>;
  static constexpr int kValues = kCentered ? 4 : 1;

  __device__ __forceinline__ NormPart(const Norm& p, int64_t row, int rank, int size)
      : p_(p),
        row_(row),
        is_first_(rank == 0),
        y_(static_cast<T*>(p.y) + row * p.columns),
        tile_(y_, static_cast<int>(p.columns), rank, size) {}

  __device__ __forceinline__ void load() {
    tile_.load(static_cast<const T*>(p_.x) + row_ * p_.x_row_stride, items_);
    if (p_.residual == nullptr) return;
    with_residual<T>(p_, row_, [&](auto* residual) {
#pragma unroll
      for (int k = 0; k < kItems; ++k) {
        C z[kLanes], other[kLanes] = {};
        widen(items_[k], z);
        tile_.load_parameters(k, residual, other);
#pragma unroll
        for (int i = 0; i < Tile::lanes(k); ++i) items_[k].lane[i] = convert<T>(z[i] + other[i]);
      }
    });
  }

  template <class Team>
  __device__ __forceinline__ void reduce(Team& team, C (&values)[kValues]) const {
    C center = 0;
    const C count = static_cast<C>(tile_.count_of_warp());
    if constexpr (kCentered) {
      C total[1] = {};
#pragma unroll
      for (int k = 0; k < kItems; ++k) {
        C z[kLanes];
        widen(items_[k], z);
#pragma unroll
        for (int i = 0; i < Tile::lanes(k); ++i) total[0] += z[i];
      }
      team.reduce_in_warp(total, Sum{});
      if (count > C(0)) center = total[0] / count;
    }
    C moments[2] = {};
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      C z[kLanes];
      widen(items_[k], z);
      // A missing item holds zeros.
      const C from = tile_.has_any(k) ? center : C(0);
#pragma unroll
      for (int i = 0; i < Tile::lanes(k); ++i) {
        const C distance = z[i] - from;
        moments[0] += distance * distance;
        if constexpr (kCentered) moments[1] += distance;
      }
    }
    team.reduce_in_warp(moments, Sum{});
    if constexpr (kCentered) {
      values[0] = count;
      values[1] = center;
      values[2] = moments[0];
      values[3] = moments[1];
    } else {
      values[0] = moments[0];
    }
  }

  __device__ __forceinline__ void write(const C (&values)[kValues]) {
    const C columns = static_cast<C>(p_.columns);
    const C center = kCentered ? values[kValues > 1 ? 1 : 0] : C(0);
    const C rest = kCentered ? values[kValues - 1] / columns : C(0);
    C variance = values[kCentered ? 2 : 0] / columns - rest * rest;
    if (variance < C(0)) variance = 0;  // by rounding; NaN stays
    const C rstd = rsqrt(variance + static_cast<C>(p_.eps));
    if (is_first_) {
      if (kCentered && p_.mean != nullptr) static_cast<C*>(p_.mean)[row_] = center + rest;
      if (p_.rstd != nullptr) static_cast<C*>(p_.rstd)[row_] = rstd;
    }
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      C z[kLanes], weight[kLanes], bias[kLanes];
      widen(items_[k], z);
      load_affine(p_, tile_, k, weight, bias);
      if (p_.residual != nullptr) save_sum(k, z);
#pragma unroll
      for (int i = 0; i < Tile::lanes(k); ++i) {
        if constexpr (kCentered) z[i] = z[i] - center - rest;
        z[i] *= rstd;
      }
      round_normalized<T>(p_, z);
#pragma unroll
      for (int i = 0; i < Tile::lanes(k); ++i) z[i] = z[i] * weight[i] + bias[i];
      tile_.save(true, y_, k, z);
    }
  }

 private:
  static constexpr int kLanes = Tile::kLanes;
  static constexpr int kItems = Tile::kItems;

  /// The sum may be written over the residual, whose offset from a 16-byte boundary may differ from
  /// that of y.
  __device__ __forceinline__ void save_sum(int k, const C (&z)[kLanes]) const {
    T* const sum = static_cast<T*>(p_.sum) + row_ * p_.columns;
    if (!tile_.has_any(k) || aligned(sum + tile_.column(k))) return tile_.save(true, sum, k, z);
#pragma unroll
    for (int i = 0; i < Tile::lanes(k); ++i) sum[tile_.column(k) + i] = convert<T>(z[i]);
  }

  const Norm& p_;
  int64_t row_;
  bool is_first_;
  T* y_;
  Tile tile_;
  typename Tile::Item items_[kItems];
};

}  // namespace
}  // namespace torchkiln::cuda
