#pragma once

// The vectors of heads that a thread reads in a round, requested kStages - 1 rounds ahead:
//
//   stage      0           1
//          +-----------+-----------+
//   shared | round i   | round i+1 |   read() reads stage 0, while the copies of stage 1 run;
//   memory | in use    | in flight |   advance() moves on to stage 1
//          +-----------+-----------+
//
// Each thread copies exactly the vectors that it reads later, so no barrier is needed. A ring of
// one stage is in registers, and the loads of a round are issued when the round begins.

#include <cuda_pipeline.h>

#include "ops/rope/choose_qkv.h"
#include "torchkiln/device/vec.cuh"

namespace torchkiln::cuda {

template <class T, int kLanes, int kVectors, int kStages, int kThreads>
class HeadRing {
 public:
  using Item = Vec<T, kLanes>;
  static constexpr int kBytes =
      ring_bytes(kStages, kVectors, kThreads, static_cast<int>(sizeof(Item)));

  /// `memory` has kBytes of shared memory.
  __device__ __forceinline__ explicit HeadRing(void* memory)
      : own_(static_cast<Item*>(memory) + threadIdx.x) {}

  /// Sets vectors that are never requested to zero.
  __device__ __forceinline__ void clear() const {
#pragma unroll
    for (int i = 0; i < kStages * kVectors; ++i) *slot(0, i) = Item{};
  }
  /// Starts to copy vector i of the latest round.
  __device__ __forceinline__ void request(int i, const T* from) {
    __pipeline_memcpy_async(slot(write_, i), from, sizeof(Item));
  }
  /// Ends the requests of a round.
  __device__ __forceinline__ void commit() {
    __pipeline_commit();
    write_ = write_ + 1 == kStages ? 0 : write_ + 1;
  }
  /// Waits for the oldest round in flight. kStages - 1 rounds were requested after it.
  __device__ __forceinline__ void wait() const { __pipeline_wait_prior(kStages - 1); }
  __device__ __forceinline__ Item read(int i) const { return *slot(read_, i); }
  __device__ __forceinline__ void advance() { read_ = read_ + 1 == kStages ? 0 : read_ + 1; }

 private:
  __device__ __forceinline__ Item* slot(int stage, int i) const {
    return own_ + (stage * kVectors + i) * kThreads;
  }

  Item* own_;  // [stage][vector][thread]: adjacent threads have adjacent vectors
  int write_ = 0;
  int read_ = 0;
};

template <class T, int kLanes, int kVectors, int kThreads>
class HeadRing<T, kLanes, kVectors, 1, kThreads> {
 public:
  using Item = Vec<T, kLanes>;
  static constexpr int kBytes = 0;

  __device__ __forceinline__ explicit HeadRing(void*) {}
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) items_[i] = Item{};
  }
  __device__ __forceinline__ void request(int i, const T* from) {
    items_[i] = load_constant<kLanes>(from);
  }
  __device__ __forceinline__ void commit() const {}
  __device__ __forceinline__ void wait() const {}
  __device__ __forceinline__ Item read(int i) const { return items_[i]; }
  __device__ __forceinline__ void advance() const {}

 private:
  Item items_[kVectors];
};

}  // namespace torchkiln::cuda
