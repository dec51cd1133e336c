#pragma once

// A ring of stages in shared memory. One producer fills them by bulk copies, consumers read them.
//
//                 +---------+---------+---------+
//   producer  ->  | stage 0 | stage 1 | stage 2 |  ->  consumers
//                 +---------+---------+---------+
//
// Each stage has two barriers:
//
//   full   the producer announces the bytes to come, and TMA counts them as they arrive
//   empty  every consumer arrives once it has read the stage
//
// A barrier changes phase each time it completes; wait_for_phase() takes the parity of the phase.

#include <cuda.h>

#include <cstdint>
#include <cuda/ptx>

#include "detail/barrier.cuh"

namespace torchkiln::gemm {

template <int kStages>
struct StageBarriers {
  uint64_t full[kStages];
  uint64_t empty[kStages];
};

/// A position in the ring: a stage, and the parity of its barriers' phase.
template <int kStages>
struct StageCursor {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

template <int kStages>
class StageRing {
 public:
  using Barriers = StageBarriers<kStages>;
  using Cursor = StageCursor<kStages>;

  __device__ __forceinline__ explicit StageRing(Barriers& barriers) : barriers_(barriers) {}

  /// Initialises the barriers. One thread calls it before the first __syncthreads() of the block.
  __device__ __forceinline__ void init(int consumers) {
    for (int stage = 0; stage < kStages; ++stage) {
      ::cuda::ptx::mbarrier_init(&barriers_.full[stage], 1);
      ::cuda::ptx::mbarrier_init(&barriers_.empty[stage], static_cast<uint32_t>(consumers));
    }
    ::cuda::ptx::fence_mbarrier_init(::cuda::ptx::sem_release, ::cuda::ptx::scope_cluster);
  }

  /// Producer: waits until the stage has been read, then announces the bytes to come. At first each
  /// stage is free, because the phase before the first one counts as complete.
  __device__ __forceinline__ uint64_t* claim(const Cursor& cursor, uint32_t bytes) {
    wait_for_phase(&barriers_.empty[cursor.stage], cursor.parity ^ 1);
    uint64_t* full = &barriers_.full[cursor.stage];
    ::cuda::ptx::mbarrier_arrive_expect_tx(::cuda::ptx::sem_release, ::cuda::ptx::scope_cta,
                                           ::cuda::ptx::space_shared, full, bytes);
    return full;
  }

  /// Consumer: waits until the stage has been filled.
  __device__ __forceinline__ void wait_full(const Cursor& cursor) {
    wait_for_phase(&barriers_.full[cursor.stage], cursor.parity);
  }

  /// Consumer: allows the stage to be overwritten. One of its threads calls it.
  __device__ __forceinline__ void release(int stage) {
    ::cuda::ptx::mbarrier_arrive(&barriers_.empty[stage]);
  }

 private:
  Barriers& barriers_;
};

/// Copies a box of a tensor map to shared memory; the barrier `full` counts its bytes.
__device__ __forceinline__ void copy_box(void* to, const CUtensorMap& map, int inner, int outer,
                                         int batch, uint64_t* full) {
  const int32_t at[] = {inner, outer, batch};
  ::cuda::ptx::cp_async_bulk_tensor(::cuda::ptx::space_cluster, ::cuda::ptx::space_global, to, &map,
                                    at, full);
}

/// Copies shared memory to a box of a tensor map. All writers must call fence_before_copy() and
/// synchronise before one thread calls this.
__device__ __forceinline__ void store_box(const CUtensorMap& map, int inner, int outer, int batch,
                                          const void* from) {
  const int32_t at[] = {inner, outer, batch};
  ::cuda::ptx::cp_async_bulk_tensor(::cuda::ptx::space_global, ::cuda::ptx::space_shared, &map, at,
                                    from);
}

/// Closes a group of this thread's store_box() calls.
__device__ __forceinline__ void close_stores() { ::cuda::ptx::cp_async_bulk_commit_group(); }

/// Makes this thread's stores to shared memory visible to TMA.
__device__ __forceinline__ void fence_before_copy() {
  ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
}

/// Waits until TMA has read the shared memory of all but the last kLeft groups of this thread.
template <int kLeft>
__device__ __forceinline__ void wait_until_read() {
  ::cuda::ptx::cp_async_bulk_wait_group_read(::cuda::ptx::n32_t<kLeft>{});
}

}  // namespace torchkiln::gemm
