#pragma once

// Access to the channels of a dense [outer, channels, inner] tensor, for every kernel of batch
// norm.
//
// Adjacent channels (inner = 1) are rows of a matrix [outer, channels]. Block (x, y) reads a tile
// of columns in every parts-th group of threads_y rows; a thread keeps the same kLanes columns.
//
// Otherwise a channel is `outer` planes of adjacent elements. Block (x, y) reads every parts-th
// group of threads_y segments of channel x; a segment is a plane or a piece of one. Planes for
// which folds_planes() is true are read as rows of a matrix [outer, channels * inner], whose
// columns are added to channels at the end.

#include "detail/reduce/columns.cuh"
#include "ops/batch_norm/choose.h"
#include "torchkiln/device/warp.cuh"

namespace torchkiln::cuda {

using namespace device;

namespace {

/// The access of a kernel: kLanes adjacent elements of type T at a time.
template <class Type, bool Columns, int Lanes>
struct ChannelAccess {
  using T = Type;
  using C = Compute<T>;
  static constexpr bool kColumns = Columns;
  static constexpr int kLanes = Lanes;
  static constexpr int kItems = kChannelItems;
};

/// The columns or planes, and the rows or segments, that the calling thread and its block process.
template <class Access>
class ChannelCursor {
 public:
  __device__ __forceinline__ explicit ChannelCursor(const ChannelPlan& plan) : plan_(plan) {
    const int tx = static_cast<int>(threadIdx.x) % plan.threads_x;
    const int ty = static_cast<int>(threadIdx.x) / plan.threads_x;
    first_ = int64_t{blockIdx.y} * plan.threads_y + ty;
    step_ = int64_t{gridDim.y} * plan.threads_y;
    if constexpr (Access::kColumns) {
      column_ = (int64_t{blockIdx.x} * plan.threads_x + tx) * Access::kLanes;
    } else {
      column_ = blockIdx.x;
      place_ = int64_t{tx} * Access::kLanes;
    }
    inside_ = ty < plan.threads_y && (!Access::kColumns || column_ < plan.columns);
    rows_ = inside_ && first_ < plan.rows ? (plan.rows - first_ + step_ - 1) / step_ : 0;
  }

  /// The column of the first lane, or the channel of the planes.
  __device__ __forceinline__ int64_t column() const { return column_; }
  /// The channel of each column, or the channel of the planes.
  template <int N>
  __device__ __forceinline__ void channels(int64_t (&to)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      to[i] = column_ + i;
      if (plan_.period.divisor() > 1)
        to[i] = plan_.period.quotient(static_cast<uint32_t>(column_ + i));
    }
  }
  __device__ __forceinline__ bool is_inside() const { return inside_; }
  /// The number of rows or segments of the thread.
  __device__ __forceinline__ int64_t rows() const { return rows_; }
  /// The first row or segment of the thread, and the distance to its next one.
  __device__ __forceinline__ int64_t first_row() const { return first_; }
  __device__ __forceinline__ int64_t row_step() const { return step_; }
  /// Whether `lane` of this thread has the first element of its channel in the tensor.
  __device__ __forceinline__ bool is_first(int lane, int64_t channel) const {
    if (!inside_ || first_ > 0) return false;
    return Access::kColumns ? column_ + lane == channel * plan_.period.divisor() : place_ == 0;
  }

  /// The number of rows or segments of the block.
  __device__ __forceinline__ int64_t count_of_block() const {
    const int64_t full = plan_.rows / step_, rest = plan_.rows % step_;
    int64_t last = rest - int64_t{blockIdx.y} * plan_.threads_y;
    last = last < 0 ? 0 : last > plan_.threads_y ? plan_.threads_y : last;
    return full * plan_.threads_y + last;
  }
  /// The index in the tensor of the first element of the block, for one of its columns or, with
  /// planes, its channel.
  __device__ __forceinline__ int64_t first_of_column(int64_t column) const {
    const int64_t row = int64_t{blockIdx.y} * plan_.threads_y;
    if constexpr (Access::kColumns) return row * plan_.columns + column;
    const uint32_t outer = plan_.segments.quotient(static_cast<uint32_t>(row));
    return (int64_t{outer} * plan_.layout.channels + column) * plan_.layout.inner +
           int64_t{static_cast<uint32_t>(row) - outer * plan_.segments.divisor()} * plan_.segment;
  }
  /// Whether the thread has any columns and the block any rows.
  __device__ __forceinline__ bool has_part() const {
    return inside_ && int64_t{blockIdx.y} * plan_.threads_y < plan_.rows;
  }

 private:
  template <class, bool>
  friend class ChannelWalk;

  const ChannelPlan& plan_;
  int64_t column_ = 0;
  int64_t place_ = 0;
  int64_t first_;
  int64_t step_;
  int64_t rows_;
  bool inside_;
};

/// Walks over the vectors of a thread. With kBackwards it begins with the vectors that the previous
/// kernel read last, because the L2 cache still holds them.
template <class Access, bool kBackwards>
class ChannelWalk {
 public:
  __device__ __forceinline__ explicit ChannelWalk(const ChannelCursor<Access>& cursor)
      : cursor_(cursor),
        row_(kBackwards ? cursor.first_ + (cursor.rows_ - 1) * cursor.step_ : cursor.first_),
        rows_(cursor.rows_) {
    enter();
  }

  /// The number of next() calls for all vectors.
  __device__ __forceinline__ int64_t count() const {
    return Access::kColumns ? cursor_.rows_ : cursor_.rows_ * Access::kItems;
  }

  /// The index of the first element of the current vector; -1 beyond the end.
  __device__ __forceinline__ int64_t at() const {
    if constexpr (Access::kColumns) return rows_ > 0 ? base_ : -1;
    return place_ < end_ ? base_ + place_ : -1;
  }

  __device__ __forceinline__ void next() {
    if constexpr (Access::kColumns) {
      const int64_t stride = cursor_.step_ * cursor_.plan_.columns;
      base_ += kBackwards ? -stride : stride;
      --rows_;
    } else {
      place_ += cursor_.plan_.threads_x * Access::kLanes;
      if (++item_ < Access::kItems) return;
      row_ += kBackwards ? -cursor_.step_ : cursor_.step_;
      --rows_;
      enter();
    }
  }

 private:
  /// Moves to the first vector of the current row or segment.
  __device__ __forceinline__ void enter() {
    const ChannelPlan& plan = cursor_.plan_;
    if constexpr (Access::kColumns) {
      base_ = row_ * plan.columns + cursor_.column_;
    } else {
      item_ = 0;
      end_ = 0;
      if (rows_ <= 0) return;
      const auto row = static_cast<uint32_t>(row_);
      const uint32_t outer = plan.segments.quotient(row);
      const int64_t begin = int64_t{row - outer * plan.segments.divisor()} * plan.segment;
      end_ = min(begin + plan.segment, plan.layout.inner);
      place_ = begin + cursor_.place_;
      base_ = (int64_t{outer} * plan.layout.channels + cursor_.column_) * plan.layout.inner;
    }
  }

  const ChannelCursor<Access>& cursor_;
  int64_t row_;
  int64_t rows_;
  int64_t base_;
  int64_t place_ = 0;  // first element, within the plane
  int64_t end_ = 0;
  int item_ = 0;
};

inline Status grid_of(const ChannelPlan& plan, Grid& grid) {
  if (plan.tiles > kMaxGridX) return {"too many channels for one launch"};
  if (plan.segment != 0 && plan.rows > INT32_MAX) return {"too many planes for one launch"};
  grid.blocks = dim3(static_cast<unsigned>(plan.tiles), static_cast<unsigned>(plan.parts));
  grid.threads = kChannelThreads;
  return {};
}

/// Calls body(ChannelAccess) for vectors of `lanes` elements.
template <bool kColumns, class Body>
Status with_channel_access(Dtype dtype, int lanes, const Body& body) {
  return dispatch_floating(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (sizeof(T) < 8) {
      if (lanes == kChannelLanes) return body(ChannelAccess<T, kColumns, kChannelLanes>{});
    }
    return body(ChannelAccess<T, kColumns, 1>{});
  });
}

}  // namespace
}  // namespace torchkiln::cuda
