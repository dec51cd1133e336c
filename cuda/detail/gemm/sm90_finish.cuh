#pragma once

// The epilogue of a product with an activation and a residual: the code of the finishers.

#include "detail/gemm/sm90_strip.cuh"

namespace torchkiln::gemm::sm90 {

/// Applies activation and residual in place: sums = activation(sums) + residual.
template <class T>
__device__ __forceinline__ void finish_strip(const Parameters& p, const Strip<T>& strip) {
  constexpr int kLanes = Strip<T>::kLanes;
  constexpr int kItems = Strip<T>::kItems;
  Vec<T, kLanes> residual[kItems] = {};
  if (p.residual != nullptr) {
    const int row = strip.first_row + strip.row(0);
    const int column = strip.first_column + strip.column();
    const T* from =
        static_cast<const T*>(p.residual) + (int64_t{strip.batch} * p.m + row) * p.n + column;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int row_offset = i * Strip<T>::kRowStep;
      if (row + row_offset < p.m && column < p.n)
        residual[i] = load_constant<kLanes>(from + int64_t{row_offset} * p.n);
    }
  }
  float values[kItems][kLanes];
#pragma unroll
  for (int i = 0; i < kItems; ++i) widen(load_vector<kLanes>(strip.item(i)), values[i]);
  with_activation(
      p.activation,
      [&](auto tag) {
        using Act = typename decltype(tag)::type;
#pragma unroll
        for (int i = 0; i < kItems * kLanes; ++i) {
          float& value = values[i / kLanes][i % kLanes];
          value = Act::template value<FastMath>(value);
        }
      },
      Activations{});
  if (p.residual != nullptr) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      float addend[kLanes];
      widen(residual[i], addend);
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) values[i][lane] += addend[lane];
    }
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) device::store(strip.item(i), values[i]);
}

/// The loop of one finisher warp: every third strip of each multiplier's sums.
template <class T>
__device__ __forceinline__ void finish(const Parameters& p, Shared<T>& shared, int finisher,
                                       int lane) {
  const bool has_work = p.activation != kActivation<None> || p.residual != nullptr;
  uint32_t parity = 0;
  for (int index = blockIdx.x; index < p.tiles; index += gridDim.x, parity ^= 1) {
    const Tile tile = tile_at(p, index);
    if (p.residual != nullptr) {
      const T* const of_batch = static_cast<const T*>(p.residual) + int64_t{tile.batch} * p.m * p.n;
      prefetch_tile(of_batch, p.m, p.n, p.n, tile, finisher * kWarpLanes + lane);
    }
#pragma unroll 1
    for (int multiplier = 0; multiplier < kMultipliers; ++multiplier) {
      const auto for_each_strip = [&](const auto& body) {
#pragma unroll 1
        for (int i = finisher; i < kStripsOfMultiplier; i += kFinishers)
          body(strip_at(shared, tile, multiplier, i, lane));
      };
      wait_for_phase(&shared.sums_full[multiplier], parity);
      if (p.keeps_preactivation) {
        for_each_strip([&](const Strip<T>& strip) { strip.store_box_to(p.preactivation); });
        close_stores();
        wait_until_read<0>();
        __syncwarp();
      }
      for_each_strip([&](const Strip<T>& strip) {
        if (has_work) {
          finish_strip(p, strip);
          fence_before_copy();
          __syncwarp();
        }
        strip.store_box_to(p.out);
      });
      close_stores();
      // Releases the buffer of the previous multiplier once TMA has read it. TMA first serves the
      // panels that were requested earlier, so waiting for the latest buffer here would take
      // longer: the first multiplier's buffer is released while the second's is finished.
      if (multiplier > 0) {
        wait_until_read<1>();
        if (lane == 0) ::cuda::ptx::mbarrier_arrive(&shared.sums_empty[multiplier - 1]);
      }
    }
    wait_until_read<0>();
    if (lane == 0) ::cuda::ptx::mbarrier_arrive(&shared.sums_empty[kMultipliers - 1]);
  }
}

}  // namespace torchkiln::gemm::sm90
