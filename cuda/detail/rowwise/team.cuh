#pragma once

// A team is the threads that reduce one row: part of a warp, a block, or a cluster of blocks.
//
// A reduction over a team of more than one warp has three steps and one barrier:
//
//   warp 0   x x x ... x  -- shuffles -->  a  --+
//   warp 1   x x x ... x  -- shuffles -->  b  --+-->  [ a | b | c ]  -->  every warp: lane i reads
//   warp 2   x x x ... x  -- shuffles -->  c  --+     shared memory       slot i, then shuffles
//
//            reduce_in_warp()                   publish()               reduce_published()
//
// In a cluster every block has a copy of the slots: lane i of a warp stores the warp's value into
// the shared memory of block i.

#include <cooperative_groups.h>

#include <cuda/ptx>

#include "detail/barrier.cuh"
#include "detail/rowwise/plans.h"
#include "torchkiln/device/launch.cuh"
#include "torchkiln/device/warp.cuh"

namespace torchkiln::rowwise {
using namespace device;

/// A team, as seen by the calling thread. kShared: teams of several warps may share a block. Such a
/// kernel reserves the 16 named barriers of a block; an SM has 64, so 4 such blocks fit.
template <class C, int kValues, bool kShared = false, int kSlots = kMaxWarps>
class Team {
 public:
  __device__ __forceinline__ Team(const TeamShape& shape, TeamStorage<C, kValues, kSlots>& storage)
      : shape_(shape), storage_(storage) {
    const int thread = static_cast<int>(threadIdx.x);
    index_ = kShared ? thread / shape.threads : thread >> shape.log_threads;
    rank_in_block_ = thread - index_ * shape.threads;
    block_ = static_cast<int>(blockIdx.x) & (shape.blocks() - 1);
  }

  /// Initialises the cluster barriers. Every thread must call it, after issuing its first loads,
  /// because the blocks of a cluster wait for each other here.
  __device__ __forceinline__ void init_barriers() {
#if __CUDA_ARCH__ >= 900
    namespace ptx = ::cuda::ptx;
    if (shape_.log_blocks == 0) return;
    if (threadIdx.x == 0) {
      ptx::mbarrier_init(&storage_.arrived[0], 1);
      ptx::mbarrier_init(&storage_.arrived[1], 1);
      ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
    }
    // Shared memory of another block may be written only once that block has started.
    ptx::barrier_cluster_arrive(ptx::sem_relaxed);
    ptx::barrier_cluster_wait();
#endif
  }

  /// Index of the team in its block.
  __device__ __forceinline__ int index() const { return index_; }
  /// Index of the thread in its team, counted in its own block and in all blocks; number of threads
  /// of the team.
  __device__ __forceinline__ int rank_in_block() const { return rank_in_block_; }
  __device__ __forceinline__ int rank() const { return block_ * shape_.threads + rank_in_block_; }
  __device__ __forceinline__ int size() const { return shape_.size(); }

  /// Index of this block or cluster, and the number of blocks or clusters.
  __device__ __forceinline__ int64_t group() const { return blockIdx.x >> shape_.log_blocks; }
  __device__ __forceinline__ int64_t groups() const { return gridDim.x >> shape_.log_blocks; }
  /// Index of the block's or cluster's first team, and the number of teams in the grid.
  __device__ __forceinline__ int64_t first_team() const { return group() * shape_.per_block; }
  __device__ __forceinline__ int64_t teams() const { return groups() * shape_.per_block; }

  /// Reduces each of the values over the team; every thread gets the results. All threads of the
  /// block must call it.
  template <class Op, int N>
  __device__ __forceinline__ void reduce(C (&values)[N], Op op) {
    static_assert(N <= kValues, "the storage has no room for so many values");
    reduce_in_warp(values, op);
    reduce_warps(values, op);
  }

  /// The second half of reduce(): for values that are equal in all lanes of a warp.
  template <class Op, int N>
  __device__ __forceinline__ void reduce_warps(C (&values)[N], Op op) {
    C own[N];
#pragma unroll
    for (int i = 0; i < N; ++i) own[i] = values[i];
    publish(own);
    reduce_published(own, values, op, [](const C(&published)[N], C(&to)[N]) {
#pragma unroll
      for (int i = 0; i < N; ++i) to[i] = published[i];
    });
  }

  /// Writes the values of each warp, equal in all its lanes, to all blocks of the team. All threads
  /// of the block must call it.
  template <int N>
  __device__ __forceinline__ void publish(const C (&values)[N]) {
    static_assert(N <= kValues, "the storage has no room for so many values");
    if (shape_.in_warp()) return;
    const int lane = rank_in_block_ % kWarpLanes;
    const int warp = rank_in_block_ / kWarpLanes;
    const int half = exchanges_ & 1;
    auto& slots = storage_.slots[half];
    if (shape_.log_blocks == 0) {
      if (lane == 0) {
#pragma unroll
        for (int i = 0; i < N; ++i) slots[i][first_slot() + warp] = values[i];
      }
      if constexpr (kShared) {
        asm volatile("bar.sync %0, %1;" ::"r"(index_ + 1), "r"(shape_.threads) : "memory");
      } else {
        __syncthreads();
      }
    } else {
      publish_to_cluster(values, slots, half, block_ * warps() + warp, team_warps(), lane);
    }
    ++exchanges_;
  }

  /// Reduces the values that the warps published last. Before values of a warp are combined,
  /// transform(published, values) converts them. `own`: the values that this warp published.
  template <class Op, int N, int M, class Transform>
  __device__ __forceinline__ void reduce_published(const C (&own)[N], C (&values)[M], Op op,
                                                   const Transform& transform) const {
    if (shape_.in_warp()) {
      transform(own, values);
      return;
    }
    const auto& slots = storage_.slots[(exchanges_ - 1) & 1];
    const auto read = [&](int at, C(&to)[M]) {
      C published[N];
#pragma unroll
      for (int i = 0; i < N; ++i) published[i] = slots[i][first_slot() + at];
      transform(published, to);
    };
    // Each group of `width` lanes reduces the same slots, so that there are fewer shuffle steps.
    const int count = team_warps();
    int width = kWarpLanes;
    while (width / 2 >= count) width /= 2;
    const int slot = rank_in_block_ & (width - 1);
    clear(op, values, 0);
    if (slot < count) read(slot, values);
    for (int at = slot + kWarpLanes; at < count; at += kWarpLanes) {
      C others[M];
      read(at, others);
      combine(op, values, others, 0);
    }
    reduce_warp(values, op, width);
  }

  /// Value i of the values that the team's first warp published last. `own`: the values that this
  /// warp published.
  template <int N>
  __device__ __forceinline__ C first_published(const C (&own)[N], int i) const {
    return shape_.in_warp() ? own[i] : storage_.slots[(exchanges_ - 1) & 1][i][first_slot()];
  }

  /// Reduces over those lanes of the calling warp that belong to its team.
  template <class Op, int N>
  __device__ __forceinline__ void reduce_in_warp(C (&values)[N], Op op) {
    if (shape_.in_warp()) {
      reduce_warp(values, op, shape_.threads);
    } else {
      reduce_warp(values, op);
    }
  }

 private:
  __device__ __forceinline__ int warps() const { return shape_.threads / kWarpLanes; }
  /// Warps of the team in all blocks.
  __device__ __forceinline__ int team_warps() const { return warps() << shape_.log_blocks; }
  /// The first slot of the team. The teams of a block have consecutive slots.
  __device__ __forceinline__ int first_slot() const { return index_ * warps(); }

  /// Each warp stores its values into every block of the cluster; the mbarrier of a block counts
  /// the bytes. A cluster barrier would also wait for all earlier stores to global memory.
  template <class Slots, int N>
  __device__ __forceinline__ void publish_to_cluster(const C (&values)[N], Slots& slots, int half,
                                                     int at, int count, int lane) {
#if __CUDA_ARCH__ >= 900
    namespace ptx = ::cuda::ptx;
    uint64_t* arrived = &storage_.arrived[half];
    if (threadIdx.x == 0) {
      const uint32_t bytes = static_cast<uint32_t>(count * N) * static_cast<uint32_t>(sizeof(C));
      ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, arrived,
                                     bytes);
    }
    if (lane < shape_.blocks()) {
      const auto cluster = cooperative_groups::this_cluster();
      uint64_t* remote = cluster.map_shared_rank(arrived, lane);
#pragma unroll
      for (int i = 0; i < N; ++i)
        ptx::st_async(cluster.map_shared_rank(&slots[i][at], lane), values[i], remote);
    }
    const uint32_t parity = static_cast<uint32_t>(exchanges_ >> 1) & 1u;
    wait_for_phase(arrived, parity, ptx::scope_cluster);
#else
    (void)values, (void)slots, (void)half, (void)at, (void)count, (void)lane;
#endif
  }

  TeamShape shape_;
  TeamStorage<C, kValues, kSlots>& storage_;
  int index_;
  int block_;
  int rank_in_block_;
  unsigned exchanges_ = 0;
};

}  // namespace torchkiln::rowwise
