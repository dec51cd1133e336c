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

  /// Rows of a stream: the first, how many elements further the next one is, and the first of the
  /// tensor, before which nothing is read.
  __device__ __forceinline__ void start(int stream, const T* row, int64_t step, const T* begin) {
    next_[stream] = row + column(0);
    row_step_[stream] = step;
    begin_[stream] = begin;
  }

  /// Starts to copy the next row, if there is one, of every stream.
  __device__ __forceinline__ void fetch(bool is_row) {
    Item* to = own_ + write_ * (kItems * kStreams * kThreads);
    write_ = write_ + 1 == kStages ? 0 : write_ + 1;
    if (is_row) {
#pragma unroll
      for (int stream = 0; stream < kStreams; ++stream) {
#pragma unroll
        for (int k = 0; k < kItems; ++k) {
          Item* slot = to + (stream * kItems + k) * kThreads;
          const T* from = next_[stream] + (column(k) - column(0));
          if constexpr (Access::kWhole) {
            if (has_any(k)) __pipeline_memcpy_async(slot, from, sizeof(Item));
          } else if (has_any(k)) {
            // Behind the row come zeros; before it the end of the row before, which read() drops.
            const int behind = max(column(k) + Access::kLanes - access().columns, 0);
            if (from >= begin_[stream]) {
              __pipeline_memcpy_async(slot, from, sizeof(Item), behind * sizeof(T));
            } else {
              *slot = access().load(from - column(k), column(k));
            }
          }
        }
        next_[stream] += row_step_[stream];
      }
    }
    __pipeline_commit();
  }

  /// Waits for the oldest row, after which kStages - 1 were fetched. read() reads it until pass().
  __device__ __forceinline__ void wait() const { __pipeline_wait_prior(kStages - 1); }
  __device__ __forceinline__ void pass() { read_ = read_ + 1 == kStages ? 0 : read_ + 1; }

  template <class C>
  __device__ __forceinline__ void read(int stream, int k, C (&values)[Access::kLanes]) const {
    widen(own_[((read_ * kStreams + stream) * kItems + k) * kThreads], values);
    if constexpr (!Access::kWhole) {
      if (k > 0) return;
#pragma unroll
      for (int i = 0; i < Access::kLanes; ++i)
        if (column(0) + i < 0) values[i] = C(0);
    }
  }

 private:
  Item* own_;  // [stage][stream][item][thread]: neighbours in a warp read neighbouring vectors
  int write_ = 0;
  int read_ = 0;
  const T* next_[kStreams];
  int64_t row_step_[kStreams];
  const T* begin_[kStreams];
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
