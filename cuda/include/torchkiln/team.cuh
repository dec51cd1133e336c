#pragma once

// Who shares a row: some lanes of a warp, a block, or a cluster of blocks. And how what each of
// them knows of the row becomes known to all.

#include <cooperative_groups.h>

#include <algorithm>
#include <cuda/ptx>

#include "torchkiln/launch.cuh"

namespace torchkiln {

inline constexpr int kWarpLanes = 32;
inline constexpr int kMostClusterBlocks = 8;    // what every GPU with clusters has room for
inline constexpr int kLargeClusterBlocks = 16;  // what some have room for, when a kernel asks
inline constexpr int kMostTeamThreads = 512;    // of a block of a cluster
inline constexpr int kMostWarps = kMostClusterBlocks * kMostTeamThreads / kWarpLanes;

/// How teams combine values: what counts for nothing, and a += b for all of them.
struct Add {
  template <class C, int N>
  static __device__ __forceinline__ void clear(C (&a)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) a[i] = C(0);
  }
  template <class C, int N>
  __device__ __forceinline__ void operator()(C (&a)[N], const C (&b)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) a[i] += b[i];
  }
};

/// The larger numbers; NaN only where both are.
struct Largest {
  template <class C, int N>
  static __device__ __forceinline__ void clear(C (&a)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) a[i] = -C(INFINITY);
  }
  template <class C, int N>
  __device__ __forceinline__ void operator()(C (&a)[N], const C (&b)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) a[i] = fmax(a[i], b[i]);
  }
};

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
struct Meeting {  // of kSlots warps at most
  C slots[2][kValues][kSlots];
  uint64_t arrived[2];
};

/// A thread's place in its team. kShared: teams of several warps may share a block. A kernel that
/// allows it takes all of the block's barriers, of which a multiprocessor has 64.
template <class C, int kValues, bool kShared = false, int kSlots = kMostWarps>
class Team {
 public:
  __device__ __forceinline__ Team(const TeamShape& shape, Meeting<C, kValues, kSlots>& meeting)
      : shape_(shape), meeting_(meeting) {
    const int thread = static_cast<int>(threadIdx.x);
    index_ = kShared ? thread / shape.threads : thread >> shape.log_threads;
    rank_in_block_ = thread - index_ * shape.threads;
    block_ = static_cast<int>(blockIdx.x) & (shape.blocks() - 1);
  }

  /// Makes ready to meet. All threads call it, once what they ask of memory is on the way: a
  /// cluster's blocks wait for each other here.
  __device__ __forceinline__ void open() {
#if __CUDA_ARCH__ >= 900
    namespace ptx = ::cuda::ptx;
    if (shape_.log_blocks == 0) return;
    if (threadIdx.x == 0) {
      ptx::mbarrier_init(&meeting_.arrived[0], 1);
      ptx::mbarrier_init(&meeting_.arrived[1], 1);
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
  __device__ __forceinline__ void combine(C (&values)[N], Op op) {
    static_assert(N <= kValues, "the meeting has no room for so many values");
    combine_in_warp(values, op);
    combine_warps(values, op);
  }

  /// The same of values that all lanes of a warp agree upon.
  template <class Op, int N>
  __device__ __forceinline__ void combine_warps(C (&values)[N], Op op) {
    C own[N];
#pragma unroll
    for (int i = 0; i < N; ++i) own[i] = values[i];
    tell(own);
    combine_told(own, values, op, [](const C(&told)[N], C(&to)[N]) {
#pragma unroll
      for (int i = 0; i < N; ++i) to[i] = told[i];
    });
  }

  /// Each warp tells all of the team what its lanes agree upon. All threads of the block call it.
  template <int N>
  __device__ __forceinline__ void tell(const C (&values)[N]) {
    static_assert(N <= kValues, "the meeting has no room for so many values");
    if (shape_.in_warp()) return;
    const int lane = rank_in_block_ % kWarpLanes;
    const int warp = rank_in_block_ / kWarpLanes;
    const int turn = meetings_ & 1;
    auto& slots = meeting_.slots[turn];
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
      tell_cluster(values, slots, turn, block_ * warps() + warp, told_by(), lane);
    }
    ++meetings_;
  }

  /// Combines what each warp told last, as of(told, values) makes something of it. `own`: what this
  /// warp told.
  template <class Op, int N, int M, class Of>
  __device__ __forceinline__ void combine_told(const C (&own)[N], C (&values)[M], Op op,
                                               const Of& of) const {
    if (shape_.in_warp()) {
      of(own, values);
      return;
    }
    const auto& slots = meeting_.slots[(meetings_ - 1) & 1];
    const auto read = [&](int at, C(&to)[M]) {
      C told[N];
#pragma unroll
      for (int i = 0; i < N; ++i) told[i] = slots[i][first_slot() + at];
      of(told, to);
    };
    // As many exchanges as the next power of two of slots takes.
    const int count = told_by();
    int width = kWarpLanes;
    while (width / 2 >= count) width /= 2;
    const int place = rank_in_block_ & (width - 1);
    Op::clear(values);
    if (place < count) read(place, values);
    for (int at = place + kWarpLanes; at < count; at += kWarpLanes) {
      C others[M];
      read(at, others);
      op(values, others);
    }
    for (int offset = width / 2; offset > 0; offset /= 2) exchange(values, offset, op);
  }

  /// What the team's first warp told last, of value i. `own`: what this warp told.
  template <int N>
  __device__ __forceinline__ C first_told(const C (&own)[N], int i) const {
    return shape_.in_warp() ? own[i] : meeting_.slots[(meetings_ - 1) & 1][i][first_slot()];
  }

  /// The same over the team's lanes of a warp alone.
  template <class Op, int N>
  __device__ __forceinline__ void combine_in_warp(C (&values)[N], Op op) {
    if (shape_.in_warp()) {
      for (int offset = shape_.threads / 2; offset > 0; offset /= 2) exchange(values, offset, op);
    } else {
#pragma unroll
      for (int offset = kWarpLanes / 2; offset > 0; offset /= 2) exchange(values, offset, op);
    }
  }

 private:
  __device__ __forceinline__ int warps() const { return shape_.threads / kWarpLanes; }
  /// Warps of the team.
  __device__ __forceinline__ int told_by() const { return warps() << shape_.log_blocks; }
  /// Several teams of a block have the slots one after the other.
  __device__ __forceinline__ int first_slot() const { return index_ * warps(); }

  template <class Op, int N>
  static __device__ __forceinline__ void exchange(C (&values)[N], int offset, Op op) {
    C others[N];
#pragma unroll
    for (int i = 0; i < N; ++i) others[i] = __shfl_xor_sync(~0u, values[i], offset);
    op(values, others);
  }

  /// Each warp stores its values in every block of the cluster, whose barrier counts the bytes: a
  /// barrier of the whole cluster would also wait for all that was stored to global memory.
  template <class Slots, int N>
  __device__ __forceinline__ void tell_cluster(const C (&values)[N], Slots& slots, int turn, int at,
                                               int count, int lane) {
#if __CUDA_ARCH__ >= 900
    namespace ptx = ::cuda::ptx;
    uint64_t* arrived = &meeting_.arrived[turn];
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
    const uint32_t parity = static_cast<uint32_t>(meetings_ >> 1) & 1u;
    while (!ptx::mbarrier_try_wait_parity(ptx::sem_acquire, ptx::scope_cluster, arrived, parity)) {
    }
#else
    (void)values, (void)slots, (void)turn, (void)at, (void)count, (void)lane;
#endif
  }

  TeamShape shape_;
  Meeting<C, kValues, kSlots>& meeting_;
  int index_;
  int block_;
  int rank_in_block_;
  unsigned meetings_ = 0;
};

}  // namespace torchkiln
