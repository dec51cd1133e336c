#pragma once

// A row in the registers of a block of 256 threads: a thread holds kVectors vectors of 16 bytes.

#include <torchkiln/device/block_reduce.cuh>
#include <torchkiln/device/vec.cuh>

constexpr int kThreads = 256;

template <class T, int kVectors>
struct Row {
  static constexpr int kLanes = torchkiln::device::kVectorLanes<T>;

  int columns;
  torchkiln::device::Vec<T, kLanes> held[kVectors];

  // All loads are issued before the first value is used.
  __device__ Row(const T* from, int columns) : columns(columns) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
      if (at(v) < columns) held[v] = torchkiln::device::load_vector<kLanes>(from + at(v));
  }

  __device__ int at(int v) const { return (v * kThreads + threadIdx.x) * kLanes; }

  // Calls body(v, values) for each vector that the row has.
  template <class Body>
  __device__ __forceinline__ void for_each(const Body& body) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float values[kLanes];
      torchkiln::device::widen(held[v], values);
      if (at(v) < columns) body(v, values);
    }
  }

  __device__ __forceinline__ void write(float mean, float rstd, const T* weight, const T* bias,
                                        T* y) const {
    using namespace torchkiln::device;
    for_each([&](int v, float (&values)[kLanes]) {
      float scale[kLanes], shift[kLanes];
      widen(load_vector<kLanes>(weight + at(v)), scale);
      widen(load_vector<kLanes>(bias + at(v)), shift);
#pragma unroll
      for (int i = 0; i < kLanes; ++i) values[i] = (values[i] - mean) * rstd * scale[i] + shift[i];
      store<kLanes>(y + at(v), values);
    });
  }
};
