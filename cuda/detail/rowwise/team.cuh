#pragma once

// Who shares a row: some lanes of a warp, a block, or a cluster of blocks. And how what each of
// them knows of the row becomes known to all.

#include <cooperative_groups.h>

#include <algorithm>
#include <cuda/ptx>

#include "torchkiln/device/launch.cuh"
#include "torchkiln/device/warp.cuh"

namespace torchkiln::rowwise {
using namespace device;

inline constexpr int kMostClusterBlocks = 8;    // what every GPU with clusters has room for
inline constexpr int kLargeClusterBlocks = 16;  // what some have room for, when a kernel asks
inline constexpr int kMostTeamThreads = 512;    // of a block of a cluster
inline constexpr int kMostWarps = kMostClusterBlocks * kMostTeamThreads / kWarpLanes;

/// A team is a power of two of threads where that is no more than a warp, else a multiple of a
/// warp; it may share its block with other teams, or be a cluster of whole blocks.
struct TeamShape {
  int threads;      // of the team, in one block
  int log_threads;  // of teams of a warp or less, else 31: every thread is in the first
  int log_blocks;   // in a cluster
  int per_block;    // teams that share a block

  __host__ __device__ int blocks() const { return 1 << log_blocks; }
  __host__ __device__ int size() const { return threads << log_blocks; }
  __host__ __device__ int block_threads() const { return threads * per_block; }
  /// Whether a team has no need of barriers.
  __host__ __device__ bool in_warp() const { return threads <= kWarpLanes; }
};

inline int log2_from(int64_t least) {
  int log = 0;
  while (int64_t{1} << log < least) ++log;
  return log;
}

/// A team of at least so many threads, in blocks of up to `block_threads`, as far as clusters of
/// `most_blocks` reach; `shared_threads`: up to so many threads of several teams make up a block.
inline TeamShape team_of(int64_t threads, int block_threads, int shared_threads, int most_blocks) {
  int log_blocks = log2_from(ceil_div(threads, block_threads));
  if (1 << log_blocks > most_blocks) log_blocks = log2_from(most_blocks);
  const int64_t warps = ceil_div(ceil_div(threads, 1 << log_blocks), kWarpLanes);
  int in_block = static_cast<int>(std::min<int64_t>(warps * kWarpLanes, block_threads));
  if (threads <= kWarpLanes) in_block = 1 << log2_from(threads);
  if (2 * in_block > shared_threads) return {in_block, 31, log_blocks, 1};
  const int log_threads = in_block <= kWarpLanes ? log2_from(in_block) : 31;
  return {in_block, log_threads, log_blocks, shared_threads / in_block};
}

/// Shared memory through which a team's warps meet. Two halves take turns, so that one barrier
/// serves: who writes the next value cannot overtake who still reads the last but one.
template <class C, int kValues, int kSlots = kMostWarps>
struct TeamStorage {  // of kSlots warps at most
  C slots[2][kValues][kSlots];
  uint64_t arrived[2];
};

/// A thread's place in its team. kShared: teams of several warps may share a block. A kernel that
/// allows it takes all of the block's barriers, of which a multiprocessor has 64.
template <class C, int kValues, bool kShared = false, int kSlots = kMostWarps>
class Team {
 public:
  __device__ __forceinline__ Team(const TeamShape& shape, TeamStorage<C, kValues, kSlots>& storage)
      : shape_(shape), storage_(storage) {
    const int thread = static_cast<int>(threadIdx.x);
    index_ = kShared ? thread / shape.threads : thread >> shape.log_threads;
    rank_in_block_ = thread - index_ * shape.threads;
    block_ = static_cast<int>(blockIdx.x) & (shape.blocks() - 1);
  }

  /// Makes ready to meet. All threads call it, once what they ask of memory is on the way: a
  /// cluster's blocks wait for each other here.
  __device__ __forceinline__ void init_barriers() {
#if __CUDA_ARCH__ >= 900
    namespace ptx = ::cuda::ptx;
    if (shape_.log_blocks == 0) return;
    if (threadIdx.x == 0) {
      ptx::mbarrier_init(&storage_.arrived[0], 1);
      ptx::mbarrier_init(&storage_.arrived[1], 1);
      ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
    }
    // A block's shared memory may be written to once the block has begun.
    ptx::barrier_cluster_arrive(ptx::sem_relaxed);
    ptx::barrier_cluster_wait();
#endif
  }

  /// Which of the block's teams.
  __device__ __forceinline__ int index() const { return index_; }
  /// Which thread of the team.
  __device__ __forceinline__ int rank_in_block() const { return rank_in_block_; }
  __device__ __forceinline__ int rank() const { return block_ * shape_.threads + rank_in_block_; }
  __device__ __forceinline__ int size() const { return shape_.size(); }

  /// Which block, or cluster, of how many.
  __device__ __forceinline__ int64_t group() const { return blockIdx.x >> shape_.log_blocks; }
  __device__ __forceinline__ int64_t groups() const { return gridDim.x >> shape_.log_blocks; }
  /// The first of the group's teams, and how many teams the grid has.
  __device__ __forceinline__ int64_t first() const { return group() * shape_.per_block; }
  __device__ __forceinline__ int64_t teams() const { return groups() * shape_.per_block; }

  /// Combines each of the values over the team; every thread gets the results. All threads of the
  /// block call it.
  template <class Op, int N>
  __device__ __forceinline__ void reduce(C (&values)[N], Op op) {
    static_assert(N <= kValues, "the storage has no room for so many values");
    reduce_in_warp(values, op);
    reduce_warps(values, op);
  }

  /// The same of values that all lanes of a warp agree upon.
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

  /// Each warp tells all of the team what its lanes agree upon. All threads of the block call it.
  template <int N>
  __device__ __forceinline__ void publish(const C (&values)[N]) {
    static_assert(N <= kValues, "the storage has no room for so many values");
    if (shape_.in_warp()) return;
    const int lane = rank_in_block_ % kWarpLanes;
    const int warp = rank_in_block_ / kWarpLanes;
    const int turn = exchanges_ & 1;
    auto& slots = storage_.slots[turn];
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
      publish_to_cluster(values, slots, turn, block_ * warps() + warp, team_warps(), lane);
    }
    ++exchanges_;
  }

  /// Combines what each warp told last, as of(told, values) makes something of it. `own`: what this
  /// warp told.
  template <class Op, int N, int M, class Of>
  __device__ __forceinline__ void reduce_published(const C (&own)[N], C (&values)[M], Op op,
                                                   const Of& of) const {
    if (shape_.in_warp()) {
      of(own, values);
      return;
    }
    const auto& slots = storage_.slots[(exchanges_ - 1) & 1];
    const auto read = [&](int at, C(&to)[M]) {
      C published[N];
#pragma unroll
      for (int i = 0; i < N; ++i) published[i] = slots[i][first_slot() + at];
      of(published, to);
    };
    // As many exchanges as the next power of two of slots takes.
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

  /// What the team's first warp told last, of value i. `own`: what this warp told.
  template <int N>
  __device__ __forceinline__ C first_published(const C (&own)[N], int i) const {
    return shape_.in_warp() ? own[i] : storage_.slots[(exchanges_ - 1) & 1][i][first_slot()];
  }

  /// The same over the team's lanes of a warp alone.
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
  /// Warps of the team.
  __device__ __forceinline__ int team_warps() const { return warps() << shape_.log_blocks; }
  /// Several teams of a block have the slots one after the other.
  __device__ __forceinline__ int first_slot() const { return index_ * warps(); }

  /// Each warp stores its values in every block of the cluster, whose barrier counts the bytes: a
  /// barrier of the whole cluster would also wait for all that was stored to global memory.
  template <class Slots, int N>
  __device__ __forceinline__ void publish_to_cluster(const C (&values)[N], Slots& slots, int turn,
                                                     int at, int count, int lane) {
#if __CUDA_ARCH__ >= 900
    namespace ptx = ::cuda::ptx;
    uint64_t* arrived = &storage_.arrived[turn];
    if (threadIdx.x == 0) {
      const uint32_t bytes = static_cast<uint32_t>(count * N) * static_cast<uint32_t>(sizeof(C));
      ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, arrived,
                                     bytes);
    }
    if (lane < shape_.blocks()) {
      const auto cluster = cooperative_groups::this_cluster();
      uint64_t* theirs = cluster.map_shared_rank(arrived, lane);
#pragma unroll
      for (int i = 0; i < N; ++i)
        ptx::st_async(cluster.map_shared_rank(&slots[i][at], lane), values[i], theirs);
    }
    const uint32_t parity = static_cast<uint32_t>(exchanges_ >> 1) & 1u;
    while (!ptx::mbarrier_try_wait_parity(ptx::sem_acquire, ptx::scope_cluster, arrived, parity)) {
    }
#else
    (void)values, (void)slots, (void)turn, (void)at, (void)count, (void)lane;
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
