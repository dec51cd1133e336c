#pragma once

// Vectors of rows with any alignment. Vectors are stored at the 16-byte boundaries of the row of a
// result. The same elements are loaded from rows with any other offset:
//
//   memory   |   16 B    |   16 B    |   16 B    |   16 B    |
//   result            h h v v v v v v v v v v v v t            head, InnerVectors, tail
//   operand        h h v v v v v v v v v v v v t               PendingElements cuts out a vector
//                      |- loads -|- loads -|

#include "torchkiln/device/vec.cuh"

namespace torchkiln::rowwise {
using namespace device;

/// The inner part of a row, in whole 16-byte vectors. Up to 2 kLanes - 2 single elements remain at
/// the two edges.
template <class T>
struct InnerVectors {
  static constexpr int kLanes = kVectorLanes<T>;

  int head;   // elements before the first vector
  int count;  // number of vectors
  int edges;  // elements before and after the vectors

  __device__ __forceinline__ InnerVectors(const T* row, int columns)
      : head(min((kLanes - elements_past_boundary(row)) % kLanes, columns)),
        count((columns - head) / kLanes),
        edges(columns - count * kLanes) {}

  __device__ __forceinline__ int column(int vector) const { return head + vector * kLanes; }
  __device__ __forceinline__ int edge_column(int edge) const {
    return edge < head ? edge : edge + count * kLanes;
  }
};

/// N adjacent elements of any alignment, extracted from the aligned vectors around them. The loads
/// are in flight until read(). A launch may overwrite the elements only after all its reads.
template <class T, int N>
class PendingElements {
 public:
  __device__ __forceinline__ void load(const T* from) {
    past_ = elements_past_boundary(from);
#pragma unroll
    for (int part = 0; part <= kWhole; ++part) {
      // Skips a vector that begins after the last element, because it may lie outside of the
      // tensor's memory.
      if (part < kWhole || past_ + N > kWhole * kEach)
        parts_[part] = __ldg(reinterpret_cast<const uint4*>(from - past_) + part);
    }
  }

  __device__ __forceinline__ Vec<T, N> read() const {
    uint32_t words[4 * (kWhole + 1)];
#pragma unroll
    for (int part = 0; part <= kWhole; ++part) {
      words[4 * part] = parts_[part].x;
      words[4 * part + 1] = parts_[part].y;
      words[4 * part + 2] = parts_[part].z;
      words[4 * part + 3] = parts_[part].w;
    }
    if (past_ > 0) shift_down<T>(words, past_);
    Vec<T, N> vector;
#pragma unroll
    for (int i = 0; i < N * static_cast<int>(sizeof(T)) / 4; ++i)
      reinterpret_cast<uint32_t*>(&vector)[i] = words[i];
    return vector;
  }
  template <class C>
  __device__ __forceinline__ void read(C (&values)[N]) const {
    widen(read(), values);
  }

 private:
  static constexpr int kEach = kVectorLanes<T>;
  static constexpr int kWhole = (N + kEach - 1) / kEach;

  uint4 parts_[kWhole + 1];
  int past_;  // elements of parts_[0] before the first element
};

template <class T>
class PendingElements<T, 1> {
 public:
  __device__ __forceinline__ void load(const T* from) { element_ = __ldg(from); }
  template <class C>
  __device__ __forceinline__ void read(C (&values)[1]) const {
    values[0] = convert<C>(element_);
  }

 private:
  T element_;
};

/// Loads N adjacent elements of any alignment.
template <class T, class C, int N>
__device__ __forceinline__ void load_elements(const T* from, C (&values)[N]) {
  PendingElements<T, N> elements;
  elements.load(from);
  elements.read(values);
}

}  // namespace torchkiln::rowwise
