#pragma once

// Rows that are copied to shared memory ahead of their use. Each thread copies the vectors that it
// will read itself, so that nobody waits for anybody. Where a thread has no vector, or only a part
// of one, the rest is read as zero: what is computed from it needs no condition.

#include <cuda_pipeline.h>

#include "detail/rowwise/tile.cuh"

namespace torchkiln::rowwise {
using namespace device;

/// kItems vectors a thread of each of kStreams tensors' rows; kStages rows of a team are in shared
/// memory or on the way to it. A block has at most kThreads threads.
template <class Access, int kItems, int kStreams, int kStages, int kThreads>
class RowPipeline : public RowTile<Access, kItems> {
 public:
  using Tile = RowTile<Access, kItems>;
  using T = typename Access::T;
  using Item = typename Access::Item;
  using Tile::access;
  using Tile::column;
  using Tile::has_any;

  static constexpr int kSlots = kItems * kStreams * kStages;
  static constexpr int kBytes = kSlots * kThreads * static_cast<int>(sizeof(Item));

  /// `memory`: kBytes of shared memory.
  __device__ __forceinline__ RowPipeline(void* memory, const Access& access, int rank, int size)
      : Tile(access, rank, size), own_(static_cast<Item*>(memory) + threadIdx.x) {
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) own_[slot * kThreads] = Item{};
    if constexpr (!Access::kAligned) {
#pragma unroll
      for (int k = 0; k < kItems; ++k)
        if (has_any(k) && !access.has_all(column(k))) parts_ |= 1u << k;
    }
  }

  /// Rows of a stream: the first, how far apart they are, and how many rows further the next is.
  __device__ __forceinline__ void start(int stream, const T* row, int64_t stride, int64_t step) {
    next_[stream] = row + column(0);
    row_step_[stream] = step * stride;
    will_read(stride);
  }
  /// Rows so far apart, by start() or by load().
  __device__ __forceinline__ void will_read(int64_t stride) {
    at_ends_ = max(at_ends_, Access::rows_at_ends(stride));
  }
  /// Of all that is read together: the longest way from the ends.
  __device__ __forceinline__ bool has_neighbours(int64_t row, int64_t rows) const {
    return Access::kAligned || (row >= at_ends_ && row + at_ends_ < rows);
  }

  /// Starts to copy the next row, the tensor's `row` of `rows`, if there is one, of every stream.
  /// Whole vectors, of which wait() drops what belongs to a neighbour.
  __device__ __forceinline__ void fetch(int64_t row, int64_t rows) {
    Item* to = own_ + write_ * (kItems * kStreams * kThreads);
    write_ = write_ + 1 == kStages ? 0 : write_ + 1;
    if (row < rows) {
      const bool by_vectors = has_neighbours(row, rows);
#pragma unroll
      for (int stream = 0; stream < kStreams; ++stream) {
#pragma unroll
        for (int k = 0; k < kItems; ++k) {
          if (!has_any(k)) continue;
          Item* slot = to + (stream * kItems + k) * kThreads;
          const T* from = next_[stream] + (column(k) - column(0));
          if (by_vectors || !is_part(k)) {
            __pipeline_memcpy_async(slot, from, sizeof(Item));
          } else {
            load_part(*slot, from - column(k), k);
          }
        }
        next_[stream] += row_step_[stream];
      }
    }
    __pipeline_commit();
  }

  /// Waits for the oldest row, after which kStages - 1 were fetched. read() reads it until pass().
  __device__ __forceinline__ void wait() const {
    __pipeline_wait_prior(kStages - 1);
    each_part([&](int k) {
#pragma unroll
      for (int stream = 0; stream < kStreams; ++stream) {
        Item part = slot(stream, k);
#pragma unroll
        for (int i = 0; i < Access::kLanes; ++i)
          if (!access().has(column(k), i)) part.lane[i] = T(0.0f);
        slot(stream, k) = part;
      }
    });
  }
  __device__ __forceinline__ void pass() { read_ = read_ + 1 == kStages ? 0 : read_ + 1; }

  template <class C>
  __device__ __forceinline__ void read(int stream, int k, C (&values)[Access::kLanes]) const {
    widen(slot(stream, k), values);
  }

  /// The items of a row of another tensor, with whatever lies beside the row. complete() loads
  /// those that have no neighbour to belong to.
  __device__ __forceinline__ void load(const T* row, bool by_vectors, Item (&items)[kItems]) const {
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      items[k] = Item{};
      if (has_any(k) && (by_vectors || !is_part(k)))
        items[k] = load_vector<Access::kLanes>(row + column(k));
    }
  }
  /// Once item k of every stream has been read for the last time.
  __device__ __forceinline__ void complete(const T* row, bool by_vectors, int k, Item& item) const {
    if (by_vectors || !is_part(k)) return;
    load_part(slot(0, k), row, k);
    item = slot(0, k);
  }

  /// Stores item k of a row of results where it is `wanted`, once that of every stream has been
  /// read for the last time. What belongs to the row in part is kept for save_parts().
  template <class C>
  __device__ __forceinline__ void save(bool wanted, T* row, int k,
                                       const C (&values)[Access::kLanes]) const {
    store_if(wanted && has_any(k) && !is_part(k), row + column(k), values);
    if (is_part(k)) store(slot(0, k).lane, values);
  }
  __device__ __forceinline__ void save_parts(bool wanted, T* row) const {
    if (!wanted) return;
    each_part([&](int k) {
      const Item part = slot(0, k);
#pragma unroll
      for (int i = 0; i < Access::kLanes; ++i)
        if (access().has(column(k), i)) row[column(k) + i] = part.lane[i];
    });
  }

 private:
  /// Of the row that read() reads.
  __device__ __forceinline__ Item& slot(int stream, int k) const {
    return own_[((read_ * kStreams + stream) * kItems + k) * kThreads];
  }
  __device__ __forceinline__ bool is_part(int k) const {
    return !Access::kAligned && (parts_ >> k & 1u) != 0;
  }
  /// Calls body(k) for the items that belong to the row in part. A loop, and their lanes in shared
  /// memory: in registers of their own, what few threads do would cost all.
  template <class Body>
  __device__ __forceinline__ void each_part(const Body& body) const {
    if constexpr (!Access::kAligned) {
      if (parts_ == 0) return;
#pragma unroll 1
      for (int k = 0; k < kItems; ++k)
        if (is_part(k)) body(k);
    }
  }
  __device__ __forceinline__ void load_part(Item& to, const T* row, int k) const {
#pragma unroll 1
    for (int i = 0; i < Access::kLanes; ++i)
      to.lane[i] = access().has(column(k), i) ? row[column(k) + i] : T(0.0f);
  }

  Item* own_;  // [stage][stream][item][thread]: neighbours in a warp read neighbouring vectors
  unsigned parts_ = 0;   // items that belong to a row in part, a bit for each
  int64_t at_ends_ = 1;  // rows at either end that are not read by vectors
  int write_ = 0;
  int read_ = 0;
  const T* next_[kStreams];
  int64_t row_step_[kStreams];
};

/// Parameters of the columns of a row's part in a block, in shared memory as they are computed
/// with. Teams that share a block share them.
template <class C, int kLanes, int kItems>
class ColumnParameters {
 public:
  static constexpr int kBytes =
      kLanes * kItems * static_cast<int>(sizeof(C));  // a thread of a team

  __device__ __forceinline__ ColumnParameters(void* memory, int rank_in_block, int threads)
      : own_(static_cast<Part*>(memory) + rank_in_block), threads_(threads) {}

  __device__ __forceinline__ void set(int k, const C (&values)[kLanes]) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      Part to;
#pragma unroll
      for (int i = 0; i < kEach; ++i) to.lane[i] = values[part * kEach + i];
      own_[(k * kParts + part) * threads_] = to;
    }
  }
  __device__ __forceinline__ void read(int k, C (&values)[kLanes]) const {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const Part from = own_[(k * kParts + part) * threads_];
#pragma unroll
      for (int i = 0; i < kEach; ++i) values[part * kEach + i] = from.lane[i];
    }
  }

 private:
  static constexpr int kEach = kLanes < kVectorLanes<C> ? kLanes : kVectorLanes<C>;
  static constexpr int kParts = kLanes / kEach;
  using Part = Vec<C, kEach>;

  Part* own_;  // [item][part][thread]
  int threads_;
};

}  // namespace torchkiln::rowwise
