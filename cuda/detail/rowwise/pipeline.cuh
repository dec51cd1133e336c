#pragma once

// Rows in a ring of stages in shared memory, copied asynchronously ahead of their use:
//
//   stage      0          1          2
//          +----------+----------+----------+
//   shared | row i    | row i + 1| row i + 2|   read() reads stage 0, while the copies of stages 1
//   memory | in use   | in flight| in flight|   and 2 run; advance() moves on to stage 1
//          +----------+----------+----------+
//
// Each thread copies exactly the vectors that it reads later, so no barrier is needed. Lanes
// outside of the row read as zero, so the arithmetic on them needs no condition.

#include <cuda_pipeline.h>

#include "detail/rowwise/tile.cuh"

namespace torchkiln::rowwise {
using namespace device;

/// A team's rows of kStreams tensors. A thread has kItems vectors per row; kStages rows are in
/// shared memory or in flight. A block has at most kThreads threads.
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

  /// `memory` has kBytes of shared memory.
  __device__ __forceinline__ RowPipeline(void* memory, const Access& access, int rank, int size)
      : Tile(access, rank, size), own_(static_cast<Item*>(memory) + threadIdx.x) {
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) own_[slot * kThreads] = Item{};
    if constexpr (!Access::kAligned) {
#pragma unroll
      for (int k = 0; k < kItems; ++k)
        if (has_any(k) && !access.has_all(column(k))) partial_ |= 1u << k;
    }
  }

  /// Sets the rows of a stream: the team's first row, the stride in elements between rows, and
  /// `step`, the number of rows from one row of the team to the next.
  __device__ __forceinline__ void start(int stream, const T* row, int64_t stride, int64_t step) {
    next_[stream] = row + column(0);
    row_step_[stream] = step * stride;
    add_stride(stride);
  }
  /// Adds rows that are `stride` elements apart to those for which can_overread() holds.
  __device__ __forceinline__ void add_stride(int64_t stride) {
    edge_rows_ = max(edge_rows_, Access::edge_rows(stride));
  }
  /// Whether whole vectors may be read at both ends of this row, in every tensor.
  __device__ __forceinline__ bool can_overread(int64_t row, int64_t rows) const {
    return Access::kAligned || (row >= edge_rows_ && row + edge_rows_ < rows);
  }

  /// Starts to copy the team's next row from every stream, if there is one. It is row `row` of the
  /// `rows` rows of the tensors. Copies whole vectors as long as they are inside the tensor; wait()
  /// clears the lanes that belong to a neighbouring row.
  __device__ __forceinline__ void fetch(int64_t row, int64_t rows) {
    Item* to = own_ + write_ * (kItems * kStreams * kThreads);
    write_ = write_ + 1 == kStages ? 0 : write_ + 1;
    if (row < rows) {
      const bool overread = can_overread(row, rows);
#pragma unroll
      for (int stream = 0; stream < kStreams; ++stream) {
#pragma unroll
        for (int k = 0; k < kItems; ++k) {
          if (!has_any(k)) continue;
          Item* slot = to + (stream * kItems + k) * kThreads;
          const T* from = next_[stream] + (column(k) - column(0));
          if (overread || !is_partial(k)) {
            __pipeline_memcpy_async(slot, from, sizeof(Item));
          } else {
            load_partial(*slot, from - column(k), k);
          }
        }
        next_[stream] += row_step_[stream];
      }
    }
    __pipeline_commit();
  }

  /// Waits for the oldest row in flight. kStages - 1 rows were fetched after it. read() returns its
  /// vectors until advance().
  __device__ __forceinline__ void wait() const {
    __pipeline_wait_prior(kStages - 1);
    for_each_partial([&](int k) {
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
  __device__ __forceinline__ void advance() { read_ = read_ + 1 == kStages ? 0 : read_ + 1; }

  template <class C>
  __device__ __forceinline__ void read(int stream, int k, C (&values)[Access::kLanes]) const {
    widen(slot(stream, k), values);
  }

  /// Loads the items of a row of another tensor, including lanes outside of the row. complete()
  /// loads the partial vectors that would reach beyond the tensor.
  __device__ __forceinline__ void load(const T* row, bool overread, Item (&items)[kItems]) const {
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      items[k] = Item{};
      if (has_any(k) && (overread || !is_partial(k)))
        items[k] = load_vector<Access::kLanes>(row + column(k));
    }
  }
  /// Loads item k if it is partial and load() could not. Overwrites a slot, so call it after the
  /// last read() of item k of every stream.
  __device__ __forceinline__ void complete(const T* row, bool overread, int k, Item& item) const {
    if (overread || !is_partial(k)) return;
    load_partial(slot(0, k), row, k);
    item = slot(0, k);
  }

  /// Stores item k of a row of results if `enabled`. Call it after the last read() of item k of
  /// every stream, because a partial item is kept in its slot for save_partials().
  template <class C>
  __device__ __forceinline__ void save(bool enabled, T* row, int k,
                                       const C (&values)[Access::kLanes]) const {
    store_if(enabled && has_any(k) && !is_partial(k), row + column(k), values);
    if (is_partial(k)) store(slot(0, k).lane, values);
  }
  __device__ __forceinline__ void save_partials(bool enabled, T* row) const {
    if (!enabled) return;
    for_each_partial([&](int k) {
      const Item part = slot(0, k);
#pragma unroll
      for (int i = 0; i < Access::kLanes; ++i)
        if (access().has(column(k), i)) row[column(k) + i] = part.lane[i];
    });
  }

 private:
  /// The slot that read() returns.
  __device__ __forceinline__ Item& slot(int stream, int k) const {
    return own_[((read_ * kStreams + stream) * kItems + k) * kThreads];
  }
  __device__ __forceinline__ bool is_partial(int k) const {
    return !Access::kAligned && (partial_ >> k & 1u) != 0;
  }
  /// Calls body(k) for the partial items, in a loop over their slots in shared memory. In registers
  /// they would take space in all threads, although few threads have such items.
  template <class Body>
  __device__ __forceinline__ void for_each_partial(const Body& body) const {
    if constexpr (!Access::kAligned) {
      if (partial_ == 0) return;
#pragma unroll 1
      for (int k = 0; k < kItems; ++k)
        if (is_partial(k)) body(k);
    }
  }
  __device__ __forceinline__ void load_partial(Item& to, const T* row, int k) const {
#pragma unroll 1
    for (int i = 0; i < Access::kLanes; ++i)
      to.lane[i] = access().has(column(k), i) ? row[column(k) + i] : T(0.0f);
  }

  Item* own_;              // [stage][stream][item][thread]: adjacent threads have adjacent vectors
  unsigned partial_ = 0;   // bit k: item k belongs to the row only in part
  int64_t edge_rows_ = 1;  // rows at either end of the tensor that are not read in whole vectors
  int write_ = 0;
  int read_ = 0;
  const T* next_[kStreams];
  int64_t row_step_[kStreams];
};

/// Parameters of a block's columns in shared memory, converted to the compute type and shared by
/// all teams of the block.
template <class C, int kLanes, int kItems>
class ColumnParameters {
 public:
  static constexpr int kBytes =
      kLanes * kItems * static_cast<int>(sizeof(C));  // per thread of a team

  __device__ __forceinline__ ColumnParameters(void* memory, int rank_in_block, int threads)
      : own_(static_cast<Chunk*>(memory) + rank_in_block), threads_(threads) {}

  __device__ __forceinline__ void set(int k, const C (&values)[kLanes]) {
#pragma unroll
    for (int part = 0; part < kChunks; ++part) {
      Chunk to;
#pragma unroll
      for (int i = 0; i < kChunkLanes; ++i) to.lane[i] = values[part * kChunkLanes + i];
      own_[(k * kChunks + part) * threads_] = to;
    }
  }
  __device__ __forceinline__ void read(int k, C (&values)[kLanes]) const {
#pragma unroll
    for (int part = 0; part < kChunks; ++part) {
      const Chunk from = own_[(k * kChunks + part) * threads_];
#pragma unroll
      for (int i = 0; i < kChunkLanes; ++i) values[part * kChunkLanes + i] = from.lane[i];
    }
  }

 private:
  static constexpr int kChunkLanes = kLanes < kVectorLanes<C> ? kLanes : kVectorLanes<C>;
  static constexpr int kChunks = kLanes / kChunkLanes;
  using Chunk = Vec<C, kChunkLanes>;

  Chunk* own_;  // [item][chunk][thread]
  int threads_;
};

}  // namespace torchkiln::rowwise
