#pragma once

// Rows that are copied to shared memory ahead of their use. Each thread copies the vectors that it
// will read itself, so that nobody waits for anybody. Where a thread has no vector, or only a part
// of one, the rest is read as zero: what is computed from it needs no condition.

#include <cuda_pipeline.h>

#include "torchkiln/row.cuh"

namespace torchkiln {

/// kItems vectors a thread of each of kStreams tensors' rows; kStages rows of a team are in shared
/// memory or on the way to it. A block has at most kThreads threads.
template <class Access, int kItems, int kStreams, int kStages, int kThreads>
class RowPipeline : public RowPlace<Access, kItems> {
 public:
  using Place = RowPlace<Access, kItems>;
  using T = typename Access::T;
  using Item = typename Access::Item;
  using Place::access;
  using Place::column;
  using Place::has_any;

  static constexpr int kSlots = kItems * kStreams * kStages;
  static constexpr int kBytes = kSlots * kThreads * static_cast<int>(sizeof(Item));

  /// `memory`: kBytes of shared memory.
  __device__ __forceinline__ RowPipeline(void* memory, const Access& access, int rank, int size)
      : Place(access, rank, size), own_(static_cast<Item*>(memory) + threadIdx.x) {
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) own_[slot * kThreads] = Item{};
  }

  /// Rows of a stream: the first, and how many elements further the next one is.
  __device__ __forceinline__ void start(int stream, const T* row, int64_t step) {
    next_[stream] = row + column(0);
    row_step_[stream] = step;
  }

  /// Starts to copy the next row, the tensor's `row` of `rows`, if there is one, of every stream.
  /// Whole vectors, of which wait() drops what belongs to a neighbour; the first row has none
  /// before it, the last none behind.
  __device__ __forceinline__ void fetch(int64_t row, int64_t rows) {
    Item* to = own_ + write_ * (kItems * kStreams * kThreads);
    write_ = write_ + 1 == kStages ? 0 : write_ + 1;
    if (row < rows) {
      const bool has_neighbours = row > 0 && row + 1 < rows;
#pragma unroll
      for (int stream = 0; stream < kStreams; ++stream) {
#pragma unroll
        for (int k = 0; k < kItems; ++k) {
          if (!has_any(k)) continue;
          Item* slot = to + (stream * kItems + k) * kThreads;
          const T* from = next_[stream] + (column(k) - column(0));
          if (has_neighbours || access().has_all(column(k))) {
            __pipeline_memcpy_async(slot, from, sizeof(Item));
          } else {
            *slot = access().load_part(from - column(k), column(k), T(0.0f));
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
    if constexpr (!Access::kWhole) {
#pragma unroll
      for (int k = 0; k < kItems; ++k) {
        if (!has_any(k) || access().has_all(column(k))) continue;
#pragma unroll
        for (int stream = 0; stream < kStreams; ++stream) {
          Item& part = own_[((read_ * kStreams + stream) * kItems + k) * kThreads];
#pragma unroll
          for (int i = 0; i < Access::kLanes; ++i)
            if (!access().has(column(k), i)) part.lane[i] = T(0.0f);
        }
      }
    }
  }
  __device__ __forceinline__ void pass() { read_ = read_ + 1 == kStages ? 0 : read_ + 1; }

  template <class C>
  __device__ __forceinline__ void read(int stream, int k, C (&values)[Access::kLanes]) const {
    widen(own_[((read_ * kStreams + stream) * kItems + k) * kThreads], values);
  }

 private:
  Item* own_;  // [stage][stream][item][thread]: neighbours in a warp read neighbouring vectors
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

}  // namespace torchkiln
