#pragma once

// The slabs of a team's rows in shared memory. The copying warp fills the stages of a ring, and
// hands the sums of each slab to the other blocks.

#include <cuda/ptx>

#include "backward_slabs.cuh"
#include "detail/barrier.cuh"
#include "detail/rowwise/grid_team.cuh"

namespace torchkiln::cuda::norm_gradients {
namespace {

constexpr int kSlabThreads = 256;  // that compute
constexpr int kSlabWarps = kSlabThreads / kWarpLanes;
constexpr int kSlabBlockThreads = kSlabThreads + 2 * kWarpLanes;
constexpr int kSlabBlocks = 2;  // per SM
constexpr int kMaxSlabStages = 8;
constexpr int kSlabBytes = 32;  // of a tensor, per thread

template <int kSums>
struct SlabStorage {
  uint64_t full[kMaxSlabStages];    // a slab has arrived
  uint64_t summed[kMaxSlabStages];  // `sums` has the sums of all warps
  uint64_t added[kMaxSlabStages];   // `factors` has those of the row
  uint64_t empty[kMaxSlabStages];   // all warps have read the slab twice
  float sums[kMaxSlabStages][kSums][kSlabWarps];
  // grad_x = grad * weight * scale + (z - mean) * rstd * slope + level
  float4 factors[kMaxSlabStages];  // mean, rstd, slope, level
};

/// kLanes: elements per access; 1 if rows begin anywhere. kSums: per slab.
template <class T, int kLanes, int kTensors, int kSums>
class SlabRing {
 public:
  using Storage = SlabStorage<kSums>;

  __device__ __forceinline__ SlabRing(const NormBackward& p, const SlabPlan& plan, float* exchange,
                                      unsigned char* memory, Storage& storage)
      : p_(p),
        plan_(plan),
        exchange_(exchange, plan.blocks),
        storage_(storage),
        team_(blockIdx.y),
        begin_(static_cast<int>(blockIdx.x) * plan.columns),
        columns_(min(plan.columns, static_cast<int>(p.columns) - begin_)),
        count_((p.rows - team_ + plan.teams - 1) / plan.teams),
        memory_(memory) {}

  __device__ __forceinline__ void init() const {
    namespace ptx = ::cuda::ptx;
    for (int s = 0; s < plan_.stages; ++s) {
      ptx::mbarrier_init(&storage_.full[s], 1);
      ptx::mbarrier_init(&storage_.summed[s], kSlabWarps);
      ptx::mbarrier_init(&storage_.added[s], 1);
      ptx::mbarrier_init(&storage_.empty[s], kSlabWarps);
    }
    ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
  }

  /// The copying warp.
  __device__ __forceinline__ void copy_rows() const {
    const bool publishes = p_.grad_x != nullptr;
    for (int64_t i = 0; i < min(int64_t{plan_.stages}, count_); ++i) copy(i);
    Cursor at{};
    Cursor freed{};
    for (int64_t i = 0; i < count_; ++i, at.advance(plan_.stages)) {
      wait_for_phase(&storage_.summed[at.stage], at.parity);
      if (publishes) {
        float sums[kSums];
        add_warps(storage_.sums[at.stage], sums);
        if (lane() == 0) exchange_.publish(row(i), static_cast<int>(blockIdx.x), sums);
      }
      // The gradients of row i - lag - 1 have been written, so its stage takes another row.
      const int64_t left = i - plan_.lag - 1;
      if (left < 0) continue;
      wait_for_phase(&storage_.empty[freed.stage], freed.parity);
      freed.advance(plan_.stages);
      if (left + plan_.stages < count_) copy(left + plan_.stages);
    }
  }

 protected:
  struct Cursor {
    int stage;
    uint32_t parity;

    __device__ __forceinline__ void advance(int stages) {
      if (++stage < stages) return;
      stage = 0;
      parity ^= 1;
    }
  };

  static __device__ __forceinline__ int lane() {
    return static_cast<int>(threadIdx.x) % kWarpLanes;
  }
  /// The row that is number i of the team.
  __device__ __forceinline__ int64_t row(int64_t i) const { return team_ + i * plan_.teams; }
  /// The slab of a row, in memory.
  __device__ __forceinline__ const T* slab_of(int tensor, int64_t row) const {
    const void* const data[3] = {p_.grad, p_.z, p_.grad_sum};
    const int64_t stride[3] = {p_.grad_row_stride, p_.z_row_stride, p_.grad_sum_row_stride};
    return static_cast<const T*>(data[tensor]) + row * stride[tensor] + begin_;
  }
  /// The slab of number i of the team, in its stage.
  __device__ __forceinline__ const T* slab_in(int tensor, int64_t i, int stage) const {
    const unsigned char* const from = memory_ + (stage * kTensors + tensor) * plan_.tensor_bytes;
    if constexpr (kLanes > 1) return reinterpret_cast<const T*>(from);
    return reinterpret_cast<const T*>(from) + elements_past_boundary(slab_of(tensor, row(i)));
  }
  static __device__ __forceinline__ void arrive(uint64_t* barrier) {
    __syncwarp();
    if (lane() == 0) ::cuda::ptx::mbarrier_arrive(barrier);
  }

  const NormBackward& p_;
  const SlabPlan& plan_;
  RowExchange<float, kSums> exchange_;
  Storage& storage_;
  int64_t team_;
  int begin_;  // the first column
  int columns_;
  int64_t count_;  // of the team's rows

 private:
  /// Copies the slab of number i of the team into its stage.
  __device__ __forceinline__ void copy(int64_t i) const {
    namespace ptx = ::cuda::ptx;
    if (lane() > 0) return;
    const int stage = static_cast<int>(i % plan_.stages);
    uintptr_t from[kTensors];
    uint32_t bytes[kTensors];
    uint32_t all = 0;
#pragma unroll
    for (int tensor = 0; tensor < kTensors; ++tensor) {
      const auto first = reinterpret_cast<uintptr_t>(slab_of(tensor, row(i)));
      const uintptr_t last = first + columns_ * sizeof(T);
      from[tensor] = first / kVectorBytes * kVectorBytes;
      bytes[tensor] = static_cast<uint32_t>(
          (last + kVectorBytes - 1) / kVectorBytes * kVectorBytes - from[tensor]);
      all += bytes[tensor];
    }
    ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared,
                                   &storage_.full[stage], all);
#pragma unroll
    for (int tensor = 0; tensor < kTensors; ++tensor) {
      ptx::cp_async_bulk(ptx::space_cluster, ptx::space_global,
                         memory_ + (stage * kTensors + tensor) * plan_.tensor_bytes,
                         reinterpret_cast<const void*>(from[tensor]), bytes[tensor],
                         &storage_.full[stage]);
    }
  }

  unsigned char* memory_;
};

}  // namespace
}  // namespace torchkiln::cuda::norm_gradients
