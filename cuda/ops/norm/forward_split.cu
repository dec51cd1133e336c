// Norms of rows that do not fit in the registers of a cluster, with any offset from a 16-byte
// boundary: each block has a part of a row and reads it twice (detail/rowwise/parts.cuh).

#include "detail/rowwise/parts.cuh"
#include "forward_moments.cuh"
#include "launch.cuh"

namespace torchkiln::cuda {

using namespace device;
using namespace rowwise;
namespace {

/// The part of a long row that one thread normalizes.
template <class Tile_, bool kCentered>
class NormPart {
 public:
  using Problem = Norm;
  using Tile = Tile_;
  using T = typename Tile::T;
  using C = Compute<T>;
  using Op = MomentsOp<kCentered>;
  static constexpr int kValues = kMoments<kCentered>;

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
  __device__ __forceinline__ void reduce(Team&, C (&values)[kValues]) const {
    const auto for_own = [&](C, const auto& body) {
#pragma unroll
      for (int k = 0; k < kItems; ++k) {
        if (!tile_.has_any(k)) continue;
        C z[kLanes];
        widen(items_[k], z);
#pragma unroll
        for (int i = 0; i < Tile::lanes(k); ++i) body(z[i]);
      }
    };
    const C near = __shfl_sync(~0u, convert<C>(items_[0].lane[0]), 0);
    moments_of_warp<T, kCentered>(static_cast<C>(tile_.count_of_warp()), near, values, for_own);
  }

  __device__ __forceinline__ void write(const C (&values)[kValues]) {
    const RowStatistics<C> row = statistics_of<kCentered>(p_, values);
    if (is_first_) store_statistics(p_, row_, row);
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      C z[kLanes], weight[kLanes], bias[kLanes];
      widen(items_[k], z);
      load_affine(p_, tile_, k, weight, bias);
      if (p_.residual != nullptr) save_sum(k, z);
      normalize<T>(p_, row, weight, bias, z);
      tile_.save(true, y_, k, z);
    }
  }

 private:
  static constexpr int kLanes = Tile::kLanes;
  static constexpr int kItems = Tile::kItems;

  /// Stores z as the sum, which may overwrite the residual. Its offset from a 16-byte boundary may
  /// differ from that of y.
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

Status launch(const Norm& p, const SplitNormPlan& plan, Allocate allocate, CUstream_st* stream) {
  return dispatch_floating(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto launch = [&](auto tile) {
      using Tile = typename decltype(tile)::type;
      const auto in_parts = [&](auto centered) {
        return launch_in_parts<NormPart<Tile, centered>, kNormPartBlocks>(p, plan.parts, allocate,
                                                                          stream);
      };
      return p.centered ? in_parts(std::true_type{}) : in_parts(std::false_type{});
    };
    return plan.alignment == Alignment::scalar
               ? launch(TypeTag<PartTile<T, kFewPartVectors, false>>{})
               : launch(TypeTag<PartTile<T, kManyPartVectors, true>>{});
  });
}

}  // namespace torchkiln::cuda
