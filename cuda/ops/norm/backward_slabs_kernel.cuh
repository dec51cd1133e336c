#pragma once

// Gradients of norms for rows that begin anywhere, or that no block holds. A row is cut into slabs
// of columns. The blocks of a team have a slab each and take one row after another:
//
//   copying warp      rows i + 1, i + 2, ... -- bulk copies -->  stages of a ring
//   computing warps   row i         column sums in registers, sums of the slab
//   copying warp      row i         sums of the slab     -- RowExchange -->  other blocks
//   adding warp       row i - 1     sums of all slabs    -- shared memory -->  computing warps
//   computing warps   row i - lag   read the stage again, write grad_x, release the stage
//
// Every element is read from memory once. The copies cover whole 16-byte units, which are mapped
// wherever they hold an element, so that a slab lies in its stage with the offset that it has in
// memory. Blocks wait for each other, so all must be resident: the launch is cooperative.

#include "backward_slab_ring.cuh"
#include "detail/reduce/common.cuh"

namespace torchkiln::cuda::norm_gradients {
namespace {

/// kLanes: elements per access; 1 if rows begin anywhere.
template <class T, int kLanes, bool kCentered, bool kAdds>
class Slabs : public SlabRing<T, kLanes, kAdds ? 3 : 2, kCentered ? 2 : 1> {
  static constexpr int kSums = kCentered ? 2 : 1;
  static constexpr int kItems = kSlabBytes / static_cast<int>(sizeof(T)) / kLanes;
  using Ring = SlabRing<T, kLanes, kAdds ? 3 : 2, kSums>;
  using Ring::arrive;
  using Ring::begin_;
  using Ring::columns_;
  using Ring::count_;
  using Ring::exchange_;
  using Ring::lane;
  using Ring::p_;
  using Ring::plan_;
  using Ring::row;
  using Ring::slab_in;
  using Ring::storage_;
  using Ring::team_;
  using typename Ring::Cursor;

 public:
  using Ring::Ring;

  /// The adding warp.
  __device__ __forceinline__ void add_rows() const {
    if (p_.grad_x == nullptr) return;
    Cursor at{};
    for (int64_t i = 0; i < count_; ++i, at.advance(plan_.stages)) {
      const float mean = kCentered ? static_cast<const float*>(p_.mean)[row(i)] : 0;
      const float rstd = static_cast<const float*>(p_.rstd)[row(i)];
      // The slab has arrived, so the factors of an earlier row in this stage have been read.
      wait_for_phase(&storage_.full[at.stage], at.parity);
      float sums[kSums];
      exchange_.collect_sums(row(i), sums);
      if (lane() > 0) continue;
      const float factor =
          -factor_of_gradient<kCentered>(p_, rstd) / static_cast<float>(p_.columns);
      storage_.factors[at.stage] =
          make_float4(mean, rstd, factor * sums[0], kCentered ? factor * sums[kSums - 1] : 0);
      ::cuda::ptx::mbarrier_arrive(&storage_.added[at.stage]);
    }
  }

  /// The computing warps.
  __device__ __forceinline__ void compute_rows(float* partial) {
    load_weights();
    const float* const means = static_cast<const float*>(p_.mean);
    const float* const rstds = static_cast<const float*>(p_.rstd);
    float next_mean = kCentered ? means[row(0)] : 0;
    float next_rstd = rstds[row(0)];
    Cursor at{}, again{};
    for (int64_t i = 0; i < count_ + plan_.lag; ++i) {
      if (i < count_) {
        const float mean = next_mean;
        const float rstd = next_rstd;
        if (i + 1 < count_) {
          if constexpr (kCentered) next_mean = means[row(i + 1)];
          next_rstd = rstds[row(i + 1)];
        }
        wait_for_phase(&storage_.full[at.stage], at.parity);
        add(i, at.stage, mean, rstd);
        arrive(&storage_.summed[at.stage]);
        at.advance(plan_.stages);
      }
      if (i < plan_.lag) continue;
      if (p_.grad_x != nullptr) {
        wait_for_phase(&storage_.added[again.stage], again.parity);
        write(i - plan_.lag, again.stage);
      }
      arrive(&storage_.empty[again.stage]);
      again.advance(plan_.stages);
    }
    if (p_.grad_weight != nullptr) store_sums(weight_sum_, p_.grad_weight, partial, team_);
    if constexpr (kCentered) {
      const int64_t chunk = team_ + (p_.grad_weight == nullptr ? 0 : plan_.teams);
      if (p_.grad_bias != nullptr) store_sums(bias_sum_, p_.grad_bias, partial, chunk);
    }
  }

 private:
  __device__ __forceinline__ int column(int k) const {
    return (k * kSlabThreads + static_cast<int>(threadIdx.x)) * kLanes;
  }
  /// Calls body(k) for the items that the thread has. Most slabs lack elements only in the last
  /// one.
  template <class Body>
  __device__ __forceinline__ void for_own(const Body& body) const {
    const bool is_full = columns_ >= (kItems - 1) * kSlabThreads * kLanes;
    if (is_full) {
#pragma unroll
      for (int k = 0; k < kItems - 1; ++k) body(k);
      if (column(kItems - 1) < columns_) body(kItems - 1);
    } else {
#pragma unroll
      for (int k = 0; k < kItems - 1; ++k)
        if (column(k) < columns_) body(k);
    }
  }

  /// Calls body(k, grad, z) for the items of the slab of number i of the team.
  template <class Body>
  __device__ __forceinline__ void for_slab(int64_t i, int stage, const Body& body) const {
    const T* const grads = slab_in(0, i, stage);
    const T* const zs = slab_in(1, i, stage);
    for_own([&](int k) {
      float g[kLanes], z[kLanes];
      widen(load_vector<kLanes>(grads + column(k)), g);
      widen(load_vector<kLanes>(zs + column(k)), z);
      body(k, g, z);
    });
  }

  __device__ __forceinline__ void load_weights() {
    const RowVectors<T, kLanes, true> access(p_.grad, static_cast<int>(p_.columns));
#pragma unroll
    for (int k = 0; k < kItems; ++k)
      if (column(k) < columns_) load_any_weight(p_, access, begin_ + column(k), weight_[k]);
  }

  /// Adds a slab to the column sums, and stores its sums over each warp.
  __device__ __forceinline__ void add(int64_t i, int stage, float mean, float rstd) {
    float sums[kSums] = {};
    for_slab(i, stage, [&](int k, const float (&g)[kLanes], const float (&z)[kLanes]) {
#pragma unroll
      for (int l = 0; l < kLanes; ++l) {
        const float n = (z[l] - mean) * rstd;
        weight_sum_[k][l] += g[l] * n;
        const float d = g[l] * weight_[k][l];
        sums[0] += d * n;
        if constexpr (kCentered) {
          bias_sum_[k][l] += g[l];
          sums[1] += d;
        }
      }
    });
    reduce_warp(sums, Sum{});
    if (lane() > 0) return;
#pragma unroll
    for (int k = 0; k < kSums; ++k) storage_.sums[stage][k][threadIdx.x / kWarpLanes] = sums[k];
  }

  /// Writes the gradients of a slab.
  __device__ __forceinline__ void write(int64_t i, int stage) const {
    const T* const others = kAdds ? slab_in(2, i, stage) : nullptr;
    T* const grad_x = static_cast<T*>(p_.grad_x) + row(i) * p_.columns + begin_;
    const float4 factors = storage_.factors[stage];
    const float mean = factors.x, rstd = factors.y, slope = factors.z, level = factors.w;
    const float scale = factor_of_gradient<kCentered>(p_, rstd);
    // Half precision saves a product; with rows of float32, rstd^2 could overflow.
    const float half_slope = rstd * slope;
    for_slab(i, stage, [&](int k, float (&g)[kLanes], const float (&z)[kLanes]) {
#pragma unroll
      for (int l = 0; l < kLanes; ++l) {
        const float distance = z[l] - mean;
        const float projection =
            sizeof(T) == 2 ? distance * half_slope + level : distance * rstd * slope + level;
        g[l] = g[l] * weight_[k][l] * scale + projection;
      }
      if constexpr (kAdds) {
        float other[kLanes];
        widen(load_vector<kLanes>(others + column(k)), other);
#pragma unroll
        for (int l = 0; l < kLanes; ++l) g[l] += other[l];
      }
      store(grad_x + column(k), g);
    });
  }

  /// A row of partial sums per team; a single team writes the results.
  __device__ __forceinline__ void store_sums(const float (&sums)[kItems][kLanes], void* result,
                                             float* partial, int64_t chunk) const {
    const reduce::Result results{result, p_.weight_dtype, 1};
    for_own([&](int k) {
#pragma unroll
      for (int l = 0; l < kLanes; ++l) {
        const int64_t at = begin_ + column(k) + l;
        if (plan_.teams == 1) {
          results.store(at, sums[k][l]);
        } else {
          partial[chunk * p_.columns + at] = sums[k][l];
        }
      }
    });
  }

  float weight_[kItems][kLanes] = {};
  float weight_sum_[kItems][kLanes] = {};
  float bias_sum_[kCentered ? kItems : 1][kLanes] = {};
};

template <class T, int kLanes, bool kCentered, bool kAdds>
__global__ void __launch_bounds__(kSlabBlockThreads, kSlabBlocks)
    slab_rows(NormBackward p, SlabPlan plan, float* exchange, float* partial) {
#if __CUDA_ARCH__ >= 900
  using Rows = Slabs<T, kLanes, kCentered, kAdds>;
  __shared__ typename Rows::Storage storage;
  extern __shared__ __align__(128) unsigned char memory[];
  Rows rows(p, plan, exchange, memory, storage);
  if (threadIdx.x == 0) rows.init();
  __syncthreads();
  wait_for_previous_kernel();
  switch (static_cast<int>(threadIdx.x) / kWarpLanes - kSlabWarps) {
    case 0:
      return rows.copy_rows();
    case 1:
      return rows.add_rows();
    default:
      rows.compute_rows(partial);
  }
#else
  (void)p, (void)plan, (void)exchange, (void)partial;
#endif
}

}  // namespace
}  // namespace torchkiln::cuda::norm_gradients
