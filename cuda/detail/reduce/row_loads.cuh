#pragma once

// What one thread of a team reads of a row, and how the team adds it up.

#include "torchkiln/device/vec.cuh"
#include "torchkiln/device/warp.cuh"

namespace torchkiln::reduce {
using namespace device;
namespace rows {

// Loads of one thread that are on the way at a time.
inline constexpr int kLoads = 8;

template <class C, class T>
__device__ __forceinline__ C widened(T value) {
  return static_cast<C>(convert<Compute<T>>(value));
}

/// The sum of adjacent lanes, as a tree.
template <class C, int N>
__device__ __forceinline__ C tree_sum(C (&sum)[N]) {
#pragma unroll
  for (int half = N / 2; half > 0; half /= 2) {
#pragma unroll
    for (int i = 0; i < half; ++i) sum[i] += sum[i + half];
  }
  return sum[0];
}

/// What thread `rank` of `team` sums of a row of single elements `stride` apart.
template <class C, class T>
__device__ __forceinline__ C share_of_elements(const T* row, int64_t stride, int64_t length,
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

/// The same of adjacent elements, by vectors. The one place that knows of alignment: up to the
/// first 16-byte boundary and after the last one, threads take an element each.
template <class C, class T>
__device__ __forceinline__ C share_of_vectors(const T* row, int64_t length, int rank, int team) {
  constexpr int kLanes = kVectorLanes<T>;
  const int past = static_cast<int>(reinterpret_cast<uintptr_t>(row) / sizeof(T) % kLanes);
  const int64_t head = min(length, int64_t{(kLanes - past) % kLanes});
  const int64_t vectors = (length - head) / kLanes;
  const int64_t tail = head + vectors * kLanes;
  // On the way while the vectors are: the first threads' elements of the head, the last ones' of
  // the tail.
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
    // A group's sums first: the rounding error grows with vectors / kLoads + kLoads.
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
__device__ __forceinline__ C share(const T* row, int64_t stride, int64_t length, int rank,
                                   int team) {
  if constexpr (kAdjacent) {
    return share_of_vectors<C>(row, length, rank, team);
  } else {
    return share_of_elements<C>(row, stride, length, rank, team);
  }
}

}  // namespace rows
}  // namespace torchkiln::reduce
