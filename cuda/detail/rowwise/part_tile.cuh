#pragma once

// The elements of a long row that a thread holds in registers. Vectors lie at the 16-byte
// boundaries of the row of results; the rows that are read may have any alignment.

#include "detail/rowwise/inner_vectors.cuh"
#include "torchkiln/device/warp.cuh"

namespace torchkiln::rowwise {
using namespace device;

/// kVectors vectors per thread; the first threads also have one element each at the edges of the
/// row. kShared: a row has the same offset from a 16-byte boundary in every tensor.
template <class T_, int kVectors_, bool kShared>
class PartTile {
 public:
  using T = T_;
  using Item = Vec<T, kVectorLanes<T>>;
  static constexpr int kLanes = kVectorLanes<T>;
  static constexpr int kVectors = kVectors_;
  static constexpr int kItems = kVectors + 1;

  /// `rank`: the index of the thread among the `size` threads of the row.
  __device__ __forceinline__ PartTile(const T* results, int columns, int rank, int size)
      : vectors_(results, columns), rank_(rank), size_(size) {}

  static __device__ constexpr int lanes(int k) { return k < kVectors ? kLanes : 1; }
  __device__ __forceinline__ int column(int k) const {
    return k < kVectors ? vectors_.column(rank_ + k * size_) : vectors_.edge_column(rank_);
  }
  __device__ __forceinline__ bool has_any(int k) const {
    return k < kVectors ? rank_ + k * size_ < vectors_.count : rank_ < vectors_.edges;
  }
  __device__ __forceinline__ bool has(int k, int lane) const {
    return lane < lanes(k) && has_any(k);
  }

  /// The number of elements that the threads of the calling warp hold.
  __device__ __forceinline__ int count_of_warp() const {
    const int first = rank_ / kWarpLanes * kWarpLanes;
    int count = min(max(vectors_.edges - first, 0), kWarpLanes);
#pragma unroll
    for (int k = 0; k < kVectors; ++k)
      count += min(max(vectors_.count - first - k * size_, 0), kWarpLanes) * kLanes;
    return count;
  }

  __device__ __forceinline__ void load(const T* row, Item (&items)[kItems],
                                       T outside = T(0.0f)) const {
    PendingElements<T, kLanes> pending[kShared ? 1 : kVectors];
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if constexpr (kShared) {
        fill(items[k], outside);
        if (has_any(k)) items[k] = load_vector<kLanes>(row + column(k));
      } else {
        if (has_any(k)) pending[k].load(row + column(k));
      }
    }
    fill(items[kVectors], outside);
    if (has_any(kVectors)) items[kVectors].lane[0] = row[column(kVectors)];
    if constexpr (!kShared) {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        fill(items[k], outside);
        if (has_any(k)) items[k] = pending[k].read();
      }
    }
  }

  /// Loads item k of a row of any type. Does not change `values` of a missing item.
  template <class C, class W>
  __device__ __forceinline__ void load_parameters(int k, const W* row, C (&values)[kLanes]) const {
    if (!has_any(k)) return;
    if (k < kVectors) {
      load_elements(row + column(k), values);
    } else {
      values[0] = convert<C>(__ldg(row + column(k)));
    }
  }

  template <class C>
  __device__ __forceinline__ void save(bool enabled, T* row, int k,
                                       const C (&values)[kLanes]) const {
    if (!enabled || !has_any(k)) return;
    if (k < kVectors) {
      store(row + column(k), values);
    } else {
      row[column(k)] = convert<T>(values[0]);
    }
  }

 private:
  InnerVectors<T> vectors_;
  int rank_;
  int size_;
};

}  // namespace torchkiln::rowwise
