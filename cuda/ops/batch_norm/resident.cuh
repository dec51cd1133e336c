#pragma once

// Both passes over rows of adjacent channels in one cooperative kernel. All blocks are resident
// together, two per SM, and wait for each other twice:
//
//   first pass     sums of the block's rows, first to last; the first ones stay in shared memory
//   grid barrier
//   totals         a warp adds the sums of all blocks for a channel
//   grid barrier
//   second pass    results, last row to first: from the L2 cache, which still has what was read
//                  last, then from memory, at the end from shared memory

#include <cooperative_groups.h>

#include "factors.cuh"

namespace torchkiln::cuda {
namespace {

template <class Access>
inline constexpr int kThreadSumBytes =
    static_cast<int>(sizeof(typename Access::C)) * Access::kLanes * kChannelThreads;

template <class Streams>
inline constexpr int kResidentStages =
    (kResidentBytes - kThreadSumBytes<typename Streams::Access>) / Streams::kStageBytes;

/// Reads the vectors of a thread twice, first to last and then last to first. The first vectors
/// stay in shared memory, later ones go through a ring of stages. The vectors that were read last
/// are still in the L2 cache when the second pass begins with them. Streams: as in ChannelReader,
/// for vectors of adjacent channels. kBytesAhead: bytes of a block in flight.
template <class Streams, int kBytesAhead>
class ResidentReader {
 public:
  using Access = typename Streams::Access;
  using Item = typename Streams::Item;
  static constexpr int kStages = kResidentStages<Streams>;
  /// Stages of the ring: the vectors whose copies are in flight.
  static constexpr int kAhead = std::clamp(kBytesAhead / Streams::kStageBytes, 2, 8);
  static_assert(kStages > kAhead);

  /// Starts the first copies.
  __device__ __forceinline__ ResidentReader(const ChannelCursor<Access>& cursor,
                                            const Streams& streams, int64_t columns)
      : streams_(streams),
        first_(cursor.first_row() * columns + cursor.column()),
        stride_(cursor.row_step() * columns),
        rows_(cursor.rows()),
        kept_(rows_ <= kStages ? kStages : kStages - kAhead) {
#pragma unroll 1
    for (int row = 0; row < kAhead; ++row) start(row, row);
  }

  /// Calls use(item, index of the first element) for each vector, first to last.
  template <class Use>
  __device__ __forceinline__ void forwards(const Use& use) {
    int ring = 0;
    for (int64_t row = 0; row < rows_; ++row) {
      const bool is_kept = row < kept_;
      const int stage = is_kept ? static_cast<int>(row) : kept_ + ring;
      const Item item = take(stage, row);
      start(is_kept ? stage + kAhead : stage, row + kAhead);
      use(item, at(row));
      if (!is_kept && ++ring == kAhead) ring = 0;
    }
  }

  /// Calls use() as forwards() does, but last to first. Call it after forwards().
  template <class Use>
  __device__ __forceinline__ void backwards(const Use& use) {
    int ring = static_cast<int>((rows_ - 1 - kept_) % kAhead);  // unused if all rows are kept
    for (int64_t row = rows_ - 1; row >= 0; --row) {
      const bool is_kept = row < kept_;
      const int stage = is_kept ? static_cast<int>(row) : kept_ + ring;
      const Item item = take(stage, row);
      if (row - kAhead >= kept_) {
        start(stage, row - kAhead);
      } else {
        __pipeline_commit();
      }
      use(item, at(row));
      if (!is_kept && --ring < 0) ring = kAhead - 1;
    }
  }

 private:
  __device__ __forceinline__ int64_t at(int64_t row) const { return first_ + row * stride_; }

  __device__ __forceinline__ void start(int stage, int64_t row) {
    if (row < rows_) streams_.start(stage, at(row));
    __pipeline_commit();
  }

  __device__ __forceinline__ Item take(int stage, int64_t row) const {
    __pipeline_wait_prior(kAhead - 1);
    return streams_.finish(stage, at(row));
  }

  const Streams& streams_;
  int64_t first_;
  int64_t stride_;
  int64_t rows_;
  int kept_;
};

/// Columns whose sums a thread adds: every kChannelThreads-th column of the block.
inline constexpr int kColumnsOfThread = kResidentColumns / kChannelThreads;

/// Calls use(i, column) for the columns of the calling thread.
template <class Access, class Use>
__device__ __forceinline__ void for_each_column(const ChannelPlan& plan, const Use& use) {
  const int width = plan.threads_x * Access::kLanes;
#pragma unroll
  for (int i = 0; i < kColumnsOfThread; ++i) {
    const int in_block = static_cast<int>(threadIdx.x) + i * kChannelThreads;
    const int64_t column = int64_t{blockIdx.x} * width + in_block;
    if (in_block < width && column < plan.columns) use(i, column);
  }
}

/// Adds the values of the threads that have the same columns and calls use(i, column, sums) for the
/// columns of each thread. Uses the shared memory behind the stages.
template <class Streams, int kValues, class C, class Use>
__device__ __forceinline__ void add_resident(const ChannelPlan& plan,
                                             const C (&values)[kValues][Streams::Access::kLanes],
                                             const Use& use) {
  constexpr int kLanes = Streams::Access::kLanes;
  extern __shared__ uint4 channel_ring[];
  C* const shared = reinterpret_cast<C*>(reinterpret_cast<char*>(channel_ring) +
                                         kResidentStages<Streams> * Streams::kStageBytes);
  const int tx = static_cast<int>(threadIdx.x) % plan.threads_x;
  const int ty = static_cast<int>(threadIdx.x) / plan.threads_x;
  const int width = plan.threads_x * kLanes;
  double sums[kColumnsOfThread][kValues] = {};
#pragma unroll
  for (int v = 0; v < kValues; ++v) {
    __syncthreads();
    if (ty < plan.threads_y) {
      *reinterpret_cast<Vec<C, kLanes>*>(shared + ty * width + tx * kLanes) =
          *reinterpret_cast<const Vec<C, kLanes>*>(values[v]);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kColumnsOfThread; ++i) {
      const int column = static_cast<int>(threadIdx.x) + i * kChannelThreads;
      if (column >= width) break;
#pragma unroll 4
      for (int row = 0; row < plan.threads_y; ++row)
        sums[i][v] += static_cast<double>(shared[row * width + column]);
    }
  }
  for_each_column<typename Streams::Access>(
      plan, [&](int i, int64_t column) { use(i, column, sums[i]); });
}

/// Calls use(load(part)) for the parts of a channel that this lane adds. Loads are issued in groups
/// of kLoads.
template <class Part, class Load, class Use>
__device__ __forceinline__ void for_each_part(int64_t parts, int lane, const Load& load,
                                              const Use& use) {
  constexpr int kLoads = 9;  // enough for 264 parts: 132 SMs with two blocks each
  for (int64_t first = lane; first < parts; first += kLoads * kWarpLanes) {
    Part items[kLoads] = {};
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
      if (first + i * kWarpLanes < parts) items[i] = load(first + i * kWarpLanes);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) use(items[i]);
  }
}

/// Calls total(channel, lane) for each channel, by all lanes of one warp. Waits at a grid barrier
/// before and after.
template <class Total>
__device__ __forceinline__ void for_each_channel(int64_t channels, const Total& total) {
  const auto grid = cooperative_groups::this_grid();
  grid.sync();
  constexpr int kWarps = kChannelThreads / kWarpLanes;
  const int64_t blocks = int64_t{gridDim.x} * gridDim.y;
  const int64_t block = int64_t{blockIdx.y} * gridDim.x + blockIdx.x;
  // Adjacent channels belong to different blocks, so that few channels still occupy many SMs.
  for (int64_t channel = block + threadIdx.x / kWarpLanes * blocks; channel < channels;
       channel += blocks * kWarps)
    total(channel, static_cast<int>(threadIdx.x) % kWarpLanes);
  grid.sync();
}

inline Grid resident_grid(const ChannelPlan& plan) {
  Grid grid;
  grid.blocks = dim3(static_cast<unsigned>(plan.tiles), static_cast<unsigned>(plan.parts));
  grid.threads = kChannelThreads;
  grid.shared_bytes = kResidentBytes;
  grid.cooperative = true;
  return grid;
}

/// Calls body(ChannelAccess) for vectors of adjacent channels.
template <class Body>
Status with_resident_access(Dtype dtype, const Body& body) {
  return dispatch<float, __half, __nv_bfloat16>(dtype, [&](auto tag) {
    return body(ChannelAccess<typename decltype(tag)::type, true, kChannelLanes>{});
  });
}

}  // namespace
}  // namespace torchkiln::cuda
