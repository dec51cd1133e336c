#pragma once

// Access to the channels of a dense [outer, channels, inner] tensor, for every kernel of batch
// norm.
//
// Adjacent channels (inner = 1) are rows of a matrix [outer, channels]. Block (x, y) has a tile of
// columns and every parts-th group of threads_y rows; a thread keeps its kLanes columns.
//
// Otherwise a channel is `outer` planes of adjacent elements. Block (x, y) has channel x and every
// parts-th group of threads_y segments, each a plane or a piece of one.

#include "detail/reduce/columns.cuh"
#include "torchkiln/device/alignment.cuh"
#include "torchkiln/device/fast_divide.cuh"
#include "torchkiln/device/warp.cuh"
#include "torchkiln/kernels/batch_norm.h"

namespace torchkiln::cuda {

using namespace device;

inline constexpr int kChannelThreads = 256;
/// Elements per vector: a byte of signs for each. float32 takes two loads of 16 bytes.
inline constexpr int kChannelLanes = 8;

/// How the elements are shared among blocks and threads. Depends only on shape and device.
struct ChannelPlan {
  ChannelLayout layout;
  int threads_x;        // along a row or a segment
  int threads_y;        // rows or segments that a block reads at a time
  int64_t tiles;        // blocks along x: tiles of columns, or channels
  int64_t parts;        // blocks along y
  int64_t rows;         // rows, or segments of all planes
  int64_t segment = 0;  // elements of a segment
  Divisor segments{};   // of a plane
};

namespace {

/// Reads and writes kLanes adjacent elements of type T, `Items` of them in flight per thread.
template <class Type, bool Columns, int Lanes>
struct ChannelAccess {
  using T = Type;
  using C = Compute<T>;
  static constexpr bool kColumns = Columns;
  static constexpr int kLanes = Lanes;
};

/// The elements of one thread, in batches of kItems vectors.
template <class Access, int kItems>
class ChannelCursor {
 public:
  __device__ __forceinline__ explicit ChannelCursor(const ChannelPlan& plan) : plan_(plan) {
    const int tx = static_cast<int>(threadIdx.x) % plan.threads_x;
    const int ty = static_cast<int>(threadIdx.x) / plan.threads_x;
    first_ = int64_t{blockIdx.y} * plan.threads_y + ty;
    step_ = int64_t{gridDim.y} * plan.threads_y;
    if constexpr (Access::kColumns) {
      channel_ = (int64_t{blockIdx.x} * plan.threads_x + tx) * Access::kLanes;
    } else {
      channel_ = blockIdx.x;
      place_ = int64_t{tx} * Access::kLanes;
    }
    inside_ = ty < plan.threads_y && channel_ < plan.layout.channels;
    const int64_t rows =
        inside_ && first_ < plan.rows ? (plan.rows - first_ + step_ - 1) / step_ : 0;
    batches_ = Access::kColumns ? (rows + kItems - 1) / kItems : rows;
  }

  /// The channel of the first lane.
  __device__ __forceinline__ int64_t channel() const { return channel_; }
  __device__ __forceinline__ bool is_inside() const { return inside_; }
  /// Whether this is the only thread that has the channel and takes its first element.
  __device__ __forceinline__ bool is_first() const {
    return inside_ && first_ == 0 && (Access::kColumns || place_ == 0);
  }

  /// Calls use(item, index of the first element) for each vector; all loads of a batch are issued
  /// before its first use. Backwards, the first vectors are those that the previous kernel has read
  /// last, which the L2 cache still holds.
  template <bool kBackwards, class Load, class Use>
  __device__ __forceinline__ void each(const Load& load, const Use& use) const {
    using Item = decltype(load(int64_t{}));
    for (int64_t batch = 0; batch < batches_; ++batch) {
      int64_t at[kItems];
      Item items[kItems];
      locate(kBackwards ? batches_ - 1 - batch : batch, at);
#pragma unroll
      for (int k = 0; k < kItems; ++k)
        if (at[k] >= 0) items[k] = load(at[k]);
#pragma unroll
      for (int k = 0; k < kItems; ++k)
        if (at[k] >= 0) use(items[k], at[k]);
    }
  }

 private:
  /// Sets the indices of the vectors of a batch; -1 beyond the end.
  __device__ __forceinline__ void locate(int64_t batch, int64_t (&at)[kItems]) const {
    if constexpr (Access::kColumns) {
      const int64_t row = first_ + batch * kItems * step_;
#pragma unroll
      for (int k = 0; k < kItems; ++k) {
        const int64_t each = row + k * step_;
        at[k] = each < plan_.rows ? each * plan_.layout.channels + channel_ : -1;
      }
    } else {
      const auto row = static_cast<uint32_t>(first_ + batch * step_);
      const uint32_t outer = plan_.segments.quotient(row);
      const int64_t begin = int64_t{row - outer * plan_.segments.divisor()} * plan_.segment;
      const int64_t end = min(begin + plan_.segment, plan_.layout.inner);
      const int64_t plane =
          (int64_t{outer} * plan_.layout.channels + channel_) * plan_.layout.inner;
#pragma unroll
      for (int k = 0; k < kItems; ++k) {
        const int64_t place = begin + place_ + int64_t{k} * plan_.threads_x * Access::kLanes;
        at[k] = place < end ? plane + place : -1;
      }
    }
  }

  const ChannelPlan& plan_;
  int64_t channel_ = 0;
  int64_t place_ = 0;
  int64_t first_;
  int64_t step_;
  int64_t batches_;
  bool inside_;
};

/// Vectors in flight per thread: `halfs` in half precision, half as many in float32, whose vectors
/// have twice the size; 8 single elements.
template <class Access, int halfs>
inline constexpr int kInFlight = Access::kLanes == 1               ? 8
                                 : sizeof(typename Access::T) == 2 ? halfs
                                                                   : halfs / 2;

/// A plan for blocks that are resident together, `blocks` per SM, with `items` vectors per thread.
template <class Access>
ChannelPlan make_channel_plan(const ChannelLayout& layout, int items, int blocks) {
  constexpr int kLanes = Access::kLanes;
  ChannelPlan plan{};
  plan.layout = layout;
  if constexpr (Access::kColumns) {
    const reduce::columns::Plan columns =
        reduce::columns::make_plan(layout.outer, layout.channels, kLanes, blocks);
    plan.threads_x = columns.threads_x;
    plan.threads_y = columns.threads_y;
    plan.tiles = columns.tiles;
    plan.parts = columns.chunks;
    plan.rows = layout.outer;
  } else {
    const int64_t vectors = ceil_div(layout.inner, kLanes);
    plan.threads_x = 1;
    while (plan.threads_x < kChannelThreads && int64_t{plan.threads_x} * items < vectors)
      plan.threads_x *= 2;
    plan.threads_y = kChannelThreads / plan.threads_x;
    const int64_t segments = ceil_div(vectors, int64_t{plan.threads_x} * items);
    plan.segment = ceil_div(vectors, segments) * kLanes;
    plan.segments = Divisor(static_cast<uint32_t>(segments));
    plan.rows = layout.outer * segments;
    plan.tiles = layout.channels;
    const int64_t wave = int64_t{current_device().multiprocessors} * blocks;
    plan.parts = reduce::parts_filling_waves(plan.tiles, ceil_div(plan.rows, plan.threads_y), wave);
  }
  constexpr int64_t kMaxGridY = 65535;
  plan.parts = plan.parts > kMaxGridY ? kMaxGridY : plan.parts;
  return plan;
}

inline Status grid_of(const ChannelPlan& plan, Grid& grid) {
  if (plan.tiles > kMaxGridX) return {"too many channels for one launch"};
  if (plan.segment != 0 && plan.rows > INT32_MAX) return {"too many planes for one launch"};
  grid.blocks = dim3(static_cast<unsigned>(plan.tiles), static_cast<unsigned>(plan.parts));
  grid.threads = kChannelThreads;
  return {};
}

/// Calls body(ChannelAccess) for vectors if every row or plane consists of whole ones, else for
/// single elements. float64 has single elements only, which saves an instantiation.
template <bool kColumns, class Body>
Status with_channel_access(Dtype dtype, const ChannelLayout& layout,
                           std::initializer_list<const void*> tensors, const Body& body) {
  bool in_vectors = (kColumns ? layout.channels : layout.inner) % kChannelLanes == 0;
  for (const void* tensor : tensors) in_vectors = in_vectors && aligned(tensor);
  return dispatch_floating(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (sizeof(T) < 8) {
      if (in_vectors) return body(ChannelAccess<T, kColumns, kChannelLanes>{});
    }
    return body(ChannelAccess<T, kColumns, 1>{});
  });
}

/// Combines the values of the threads that have the same columns, or of all threads of a block with
/// one channel, as a tree; merge(own, other thread) is called for the first half of the threads
/// after publish() has stored the values of all.
template <class Access, class Publish, class Merge>
__device__ __forceinline__ void merge_threads(const ChannelPlan& plan, const Publish& publish,
                                              const Merge& merge) {
  const int width = Access::kColumns ? plan.threads_x : 1;
  const int height = Access::kColumns ? plan.threads_y : kChannelThreads;
  const int row = static_cast<int>(threadIdx.x) / width;
  for (int count = height; count > 1; count = (count + 1) / 2) {
    const int half = (count + 1) / 2;
    publish();
    __syncthreads();
    if (row + half < count) merge(static_cast<int>(threadIdx.x) + half * width);
    __syncthreads();
  }
}

/// Whether a thread has the merged values of its channels.
template <class Access>
__device__ __forceinline__ bool has_merged(const ChannelPlan& plan) {
  return static_cast<int>(threadIdx.x) < (Access::kColumns ? plan.threads_x : 1);
}

}  // namespace
}  // namespace torchkiln::cuda
