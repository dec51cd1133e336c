#pragma once

// The ring of stages in shared memory through which the slabs of a team's rows go. The copying warp
// fills the stages, and publishes the sums of each slab for the other blocks.

#include <cuda/ptx>

#include "detail/barrier.cuh"
#include "detail/rowwise/grid_team.cuh"
#include "slab_plan.h"

namespace torchkiln::cuda::norm_slabs {
namespace {

constexpr int kSlabWarps = kSlabThreads / kWarpLanes;

/// Shared memory besides the stages. kValues: sums or moments per slab.
template <int kValues>
struct SlabStorage {
  uint64_t full[kMaxSlabStages];    // a slab has arrived
  uint64_t summed[kMaxSlabStages];  // `values` has the values of all warps
  uint64_t merged[kMaxSlabStages];  // `factors` has the factors of the row
  uint64_t empty[kMaxSlabStages];   // all warps have read the slab twice
  float values[kMaxSlabStages][kValues][kSlabWarps];
  float4 factors[kMaxSlabStages];
};
static_assert(sizeof(SlabStorage<4>) + (1 << 10) <= kSlabReserved, "the system takes 1 KiB");

/// The grid of a call.
Grid make_grid(const SlabCall& call) {
  const SlabPlan& plan = call.plan;
  Grid grid{dim3(static_cast<unsigned>(plan.blocks), static_cast<unsigned>(plan.teams)),
            dim3(kSlabBlockThreads), 1, plan.shared_bytes};
  grid.cooperative = call.is_cooperative();
  return grid;
}

/// The ring of one block. kLanes: elements per access; 1 if rows may begin anywhere. Merge: has the
/// interface of AddValues.
template <class T, int kLanes, int kTensors, class Merge, int kValues>
class SlabRing {
 public:
  using Storage = SlabStorage<kValues>;

  __device__ __forceinline__ SlabRing(const SlabRows& rows, const SlabPlan& plan, float* exchange,
                                      unsigned char* memory, Storage& storage)
      : rows_(rows),
        plan_(plan),
        exchange_(exchange, plan.blocks),
        storage_(storage),
        team_(static_cast<int>(blockIdx.y)),
        begin_(static_cast<int>(blockIdx.x) * plan.columns),
        row_count_(static_cast<int>(rows.rows)),
        columns_(static_cast<int>(rows.columns)),
        count_((row_count_ - team_ + plan.teams - 1) / plan.teams),
        memory_(memory) {}

  __device__ __forceinline__ void init() const {
    namespace ptx = ::cuda::ptx;
    for (int s = 0; s < plan_.stages; ++s) {
      ptx::mbarrier_init(&storage_.full[s], 1);
      ptx::mbarrier_init(&storage_.summed[s], kSlabWarps);
      ptx::mbarrier_init(&storage_.merged[s], 1);
      ptx::mbarrier_init(&storage_.empty[s], kSlabWarps);
    }
    ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
  }

  /// The loop of the copying warp.
  __device__ __forceinline__ void copy_rows() const {
    Cursor next = first();
    int copied = 0;
    for (; copied < min(plan_.stages, count_); ++copied) {
      copy(next);
      advance(next);
    }
    Cursor at = first();
    Cursor freed = first();
    for (int i = 0; i < count_; ++i) {
      wait_for_phase(&storage_.summed[at.stage], at.parity);
      if (plan_.lag > 0) {
        float values[kValues];
        merge_warps(storage_.values[at.stage], values, Merge{});
        if (lane() == 0) exchange_.publish(at.row, static_cast<int>(blockIdx.x), values);
        __syncwarp();  // all lanes have read the values of a stage before lane 0 fills it again
      }
      advance(at);
      // Once the results of row i - lag - 1 have been written, its stage is filled with another
      // row.
      if (i <= plan_.lag) continue;
      wait_for_phase(&storage_.empty[freed.stage], freed.parity);
      advance(freed);
      if (copied++ >= count_) continue;
      copy(next);
      advance(next);
    }
  }

  /// The loop of the merging warp. Calls set(at, values, begin(at)) in one lane, with the values of
  /// the whole row. begin() starts the loads that set() needs.
  template <class Begin, class Set>
  __device__ __forceinline__ void merge_rows(const Begin& begin, const Set& set) const {
    Cursor at = first();
    for (int i = 0; i < count_; ++i, advance(at)) {
      const auto requested = begin(at);
      // This slab has arrived, which implies that the factors of the previous row in this stage
      // have been read.
      wait_for_phase(&storage_.full[at.stage], at.parity);
      float values[kValues];
      exchange_.collect(at.row, values, Merge{});
      if (lane() > 0) continue;
      set(at, values, requested);
      ::cuda::ptx::mbarrier_arrive(&storage_.merged[at.stage]);
    }
  }

 protected:
  /// A row of the team, and its stage.
  struct Cursor {
    int row;
    int run;  // the first row of the run
    int stage;
    uint32_t parity;
  };

  __device__ __forceinline__ Cursor first() const { return {team_, team_, 0, 0}; }
  __device__ __forceinline__ void advance_in_run(Cursor& at) const {
    at.row += plan_.row_step;
    if (++at.stage < plan_.stages) return;
    at.stage = 0;
    at.parity ^= 1;
  }
  __device__ __forceinline__ void advance(Cursor& at) const {
    advance_in_run(at);
    if (at.row >= row_count_) at.row = at.run += plan_.teams;
  }
  __device__ __forceinline__ int runs() const { return kLanes > 1 ? plan_.runs : 1; }
  __device__ __forceinline__ int first_row(int run) const { return team_ + run * plan_.teams; }
  __device__ __forceinline__ int rows_of_run(int run) const {
    return max(row_count_ - first_row(run) + plan_.row_step - 1, 0) / plan_.row_step;
  }

  static __device__ __forceinline__ int lane() {
    return static_cast<int>(threadIdx.x) % kWarpLanes;
  }
  __device__ __forceinline__ const T* begin_of(int tensor, int row) const {
    return static_cast<const T*>(rows_.data[tensor]) + int64_t{row} * rows_.row_stride[tensor];
  }
  /// The column of the slab's first element. With vectors, the first slab of a row begins at the
  /// last 16-byte boundary at or before the row.
  __device__ __forceinline__ int first_column(int row) const {
    return kLanes > 1 ? begin_ - elements_past_boundary(begin_of(0, row)) : begin_;
  }
  /// The slab of a tensor in its stage.
  __device__ __forceinline__ const T* slab_in(int tensor, const Cursor& at) const {
    const unsigned char* const from = memory_ + (at.stage * kTensors + tensor) * plan_.tensor_bytes;
    const T* const slab = reinterpret_cast<const T*>(from);
    return kLanes > 1 ? slab : slab + elements_past_boundary(begin_of(tensor, at.row) + begin_);
  }
  static __device__ __forceinline__ void arrive(uint64_t* barrier) {
    __syncwarp();
    if (lane() == 0) ::cuda::ptx::mbarrier_arrive(barrier);
  }

  const SlabRows& rows_;
  const SlabPlan& plan_;
  RowExchange<float, kValues> exchange_;
  Storage& storage_;
  int team_;
  int begin_;
  int row_count_;
  int columns_;  // per row
  int count_;    // rows of the team

 private:
  __device__ __forceinline__ void copy(const Cursor& to) const {
    namespace ptx = ::cuda::ptx;
    if (lane() > 0) return;
    const int column = first_column(to.row);
    const int end = min(column + plan_.columns, columns_);
    uintptr_t from[kTensors];
    uint32_t bytes[kTensors];
    uint32_t all = 0;
#pragma unroll
    for (int tensor = 0; tensor < kTensors; ++tensor) {
      const auto begin = reinterpret_cast<uintptr_t>(begin_of(tensor, to.row) + column);
      const auto last = reinterpret_cast<uintptr_t>(begin_of(tensor, to.row) + max(column, end));
      from[tensor] = begin / kVectorBytes * kVectorBytes;
      bytes[tensor] = static_cast<uint32_t>(
          (last + kVectorBytes - 1) / kVectorBytes * kVectorBytes - from[tensor]);
      all += bytes[tensor];
    }
    ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared,
                                   &storage_.full[to.stage], all);
#pragma unroll
    for (int tensor = 0; tensor < kTensors; ++tensor) {
      // The last slab is empty in rows that begin at or shortly after a boundary.
      if (bytes[tensor] == 0) continue;
      ptx::cp_async_bulk(ptx::space_cluster, ptx::space_global,
                         memory_ + (to.stage * kTensors + tensor) * plan_.tensor_bytes,
                         reinterpret_cast<const void*>(from[tensor]), bytes[tensor],
                         &storage_.full[to.stage]);
    }
  }

  unsigned char* memory_;
};

}  // namespace
}  // namespace torchkiln::cuda::norm_slabs
