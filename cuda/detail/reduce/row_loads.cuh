#pragma once

// Loads and sums of the elements of a row, by the threads of a team.

#include "detail/reduce/plans.h"
#include "torchkiln/device/vec.cuh"
#include "torchkiln/device/warp.cuh"

namespace torchkiln::reduce {
using namespace device;
namespace rows {

template <class C, class T>
__device__ __forceinline__ C widened(T value) {
  return static_cast<C>(convert<Compute<T>>(value));
}

/// The sum of an array, as a tree.
template <class C, int N>
__device__ __forceinline__ C tree_sum(C (&sum)[N]) {
#pragma unroll
  for (int half = N / 2; half > 0; half /= 2) {
#pragma unroll
    for (int i = 0; i < half; ++i) sum[i] += sum[i + half];
  }
  return sum[0];
}

/// The sum of the elements of a row that belong to this thread. Elements are `stride` apart.
template <class C, class T>
__device__ __forceinline__ C thread_sum_strided(const T* row, int64_t stride, int64_t length,
                                                int rank, int team) {
  C sum = 0;
  for (int64_t i = rank; i < length; i += int64_t{kLoads} * team) {
    T items[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      const int64_t at = i + int64_t{k} * team;
      items[k] = at < length ? row[at * stride] : T(0);
    }
    C group[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) group[k] = widened<C>(items[k]);
    sum += tree_sum(group);
  }
  return sum;
}

/// The sum of the elements of a row that belong to this thread, read in vectors. Elements before
/// the first 16-byte boundary and after the last one are read one by one, at most one of each per
/// thread.
template <class C, class T>
__device__ __forceinline__ C thread_sum_vectors(const T* row, int64_t length, int rank, int team) {
  constexpr int kLanes = kVectorLanes<T>;
  const int64_t head = min(length, int64_t{(kLanes - elements_past_boundary(row)) % kLanes});
  const int64_t vectors = (length - head) / kLanes;
  const int64_t tail = head + vectors * kLanes;
  // The single elements are in flight together with the vectors. The first threads read the head,
  // the last threads the tail.
  C edge = 0;
  if (rank < head) edge = widened<C>(row[rank]);
  if (team - 1 - rank < length - tail) edge += widened<C>(row[tail + (team - 1 - rank)]);

  const T* body = row + head;
  C sum[kLanes] = {};
  int64_t at = rank;
  Vec<T, kLanes> items[kLoads];
  for (; at + int64_t{kLoads - 1} * team < vectors; at += int64_t{kLoads} * team) {
#pragma unroll
    for (int k = 0; k < kLoads; ++k)
      items[k] = load_vector<kLanes>(body + (at + int64_t{k} * team) * kLanes);
    // Sums groups of kLoads vectors first. The rounding error then grows with n / kLoads + kLoads
    // for n vectors per thread.
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      C group = widened<C>(items[0].lane[i]);
#pragma unroll
      for (int k = 1; k < kLoads; ++k) group += widened<C>(items[k].lane[i]);
      sum[i] += group;
    }
  }
  constexpr int kFew = kLoads / 2;
  for (; at < vectors; at += int64_t{kFew} * team) {
#pragma unroll
    for (int k = 0; k < kFew; ++k) {
      items[k] = {};
      const int64_t vector = at + int64_t{k} * team;
      if (vector < vectors) items[k] = load_vector<kLanes>(body + vector * kLanes);
    }
#pragma unroll
    for (int k = 0; k < kFew; ++k) {
#pragma unroll
      for (int i = 0; i < kLanes; ++i) sum[i] += widened<C>(items[k].lane[i]);
    }
  }
  return tree_sum(sum) + edge;
}

template <class C, class T, bool kAdjacent>
__device__ __forceinline__ C thread_sum(const T* row, int64_t stride, int64_t length, int rank,
                                        int team) {
  if constexpr (kAdjacent) {
    return thread_sum_vectors<C>(row, length, rank, team);
  } else {
    return thread_sum_strided<C>(row, stride, length, rank, team);
  }
}

}  // namespace rows
}  // namespace torchkiln::reduce
