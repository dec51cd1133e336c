#pragma once

// Vectors of several tensors, read ahead into shared memory, and sums of the threads of a block.

#include <cuda_pipeline_primitives.h>

#include <algorithm>

#include "channels.cuh"
#include "torchkiln/device/block_reduce.cuh"

namespace torchkiln::cuda {
namespace {

/// The tensors that a kernel reads together, one vector of each at a time, and the packed signs of
/// an output. Null tensors are not read. After the last vector, the same shared memory holds the
/// sums of the block's threads: per element of a vector, one number of each type in `Sum`.
template <class AccessType, int kTensors, bool kSigns, class... Sum>
struct ChannelStreams {
  using Access = AccessType;
  using T = typename Access::T;
  using Vector = Vec<T, Access::kLanes>;
  struct Item {
    Vector of[kTensors];
    unsigned signs;
  };
  static constexpr bool kAhead = Access::kLanes > 1;
  static constexpr int kStageBytes =
      (kTensors * static_cast<int>(sizeof(Vector)) + (kSigns ? 4 : 0)) * kChannelThreads;
  static constexpr int kStages =
      kAhead && kRingBytes / kStageBytes < 8 ? kRingBytes / kStageBytes : 8;
  static constexpr int kSharedBytes =
      std::max(kAhead ? kStages * kStageBytes : 0,
               (0 + ... + static_cast<int>(sizeof(Sum))) * Access::kLanes * kChannelThreads);

  const T* from[kTensors];
  const uint8_t* signs;
  int64_t sign_bytes;

  /// Loads the elements at `at`.
  __device__ __forceinline__ Item load(int64_t at) const {
    Item item{};
#pragma unroll
    for (int i = 0; i < kTensors; ++i)
      if (from[i] != nullptr) item.of[i] = load_vector<Access::kLanes>(from[i] + at);
    if (kSigns && signs != nullptr) item.signs = signs[at / 8] >> (at % 8);
    return item;
  }

  /// Starts the copies of the elements at `at` to a stage. Signs are copied as the 4-byte word that
  /// holds them; its bytes beyond the last signs are 0.
  __device__ __forceinline__ void start(int stage, int64_t at) const {
    char* const to = stage_of(stage);
#pragma unroll
    for (int i = 0; i < kTensors; ++i) {
      if (from[i] == nullptr) continue;
      char* const vector = to + (i * kChannelThreads + threadIdx.x) * sizeof(Vector);
#pragma unroll
      for (int b = 0; b < static_cast<int>(sizeof(Vector)); b += kVectorBytes)
        __pipeline_memcpy_async(vector + b, reinterpret_cast<const char*>(from[i] + at) + b,
                                kVectorBytes);
    }
    if (kSigns && signs != nullptr) {
      const int64_t word = at / 8 / 4 * 4;
      const int64_t beyond = word + 4 - sign_bytes;
      __pipeline_memcpy_async(to + kTensors * sizeof(Vector) * kChannelThreads + 4 * threadIdx.x,
                              signs + word, 4, beyond > 0 ? static_cast<size_t>(beyond) : 0);
    }
  }

  /// Reads the elements at `at` back from a stage.
  __device__ __forceinline__ Item finish(int stage, int64_t at) const {
    const char* const from_stage = stage_of(stage);
    Item item{};
#pragma unroll
    for (int i = 0; i < kTensors; ++i)
      if (from[i] != nullptr)
        item.of[i] = reinterpret_cast<const Vector*>(from_stage)[i * kChannelThreads + threadIdx.x];
    if (kSigns && signs != nullptr)
      item.signs = reinterpret_cast<const unsigned*>(
                       from_stage + kTensors * sizeof(Vector) * kChannelThreads)[threadIdx.x] >>
                   (at / 8 % 4 * 8);
    return item;
  }

 private:
  static __device__ __forceinline__ char* stage_of(int stage) {
    extern __shared__ uint4 channel_ring[];
    return reinterpret_cast<char*>(channel_ring) + stage * kStageBytes;
  }
};

/// Reads the vectors of a thread through a ring of stages in shared memory, several vectors ahead
/// of their use. Each thread reads only its own copies, so no barrier is needed.
template <bool kBackwards, class Streams>
class ChannelReader {
 public:
  using Access = typename Streams::Access;
  using Item = typename Streams::Item;

  /// Starts the first copies.
  __device__ __forceinline__ ChannelReader(const ChannelCursor<Access>& cursor,
                                           const Streams& streams)
      : streams_(streams), walk_(cursor), ahead_(cursor) {
    if constexpr (Streams::kAhead) {
#pragma unroll
      for (int k = 0; k < kStages; ++k) start(k);
    }
  }

  /// Calls use(item, index of the first element) for each vector.
  template <class Use>
  __device__ __forceinline__ void each(const Use& use) {
    if constexpr (Streams::kAhead) {
      int stage = 0;
      for (int64_t left = walk_.count(); left > 0; --left) {
        const int64_t at = walk_.at();
        __pipeline_wait_prior(kStages - 1);
        const Item item = streams_.finish(stage, at);
        start(stage);
        if (++stage == kStages) stage = 0;
        if (Access::kColumns || at >= 0) use(item, at);
        walk_.next();
      }
    } else {
      for (int64_t left = walk_.count(); left > 0; left -= kStages) {
        int64_t at[kStages];
        Item items[kStages];
#pragma unroll
        for (int k = 0; k < kStages; ++k) {
          at[k] = walk_.at();
          walk_.next();
        }
#pragma unroll
        for (int k = 0; k < kStages; ++k)
          if (at[k] >= 0) items[k] = streams_.load(at[k]);
#pragma unroll
        for (int k = 0; k < kStages; ++k)
          if (at[k] >= 0) use(items[k], at[k]);
      }
    }
  }

 private:
  static constexpr int kStages = Streams::kStages;

  __device__ __forceinline__ void start(int stage) {
    const int64_t at = ahead_.at();
    if (at >= 0) streams_.start(stage, at);
    __pipeline_commit();
    ahead_.next();
  }

  const Streams& streams_;
  ChannelWalk<Access, kBackwards> walk_;
  ChannelWalk<Access, kBackwards> ahead_;
};

/// Adds the values of the block's threads that have the same columns, or of all threads if the
/// block reads planes of one channel. Calls use(column or channel, sums) once for each column or
/// channel. Reuses the shared memory of the ring.
template <class Access, int kValues, class S, class Use>
__device__ __forceinline__ void add_threads(const ChannelPlan& plan,
                                            const S (&values)[kValues][Access::kLanes],
                                            const Use& use) {
  constexpr int kLanes = Access::kLanes;
  if constexpr (Access::kColumns) {
    extern __shared__ uint4 channel_ring[];
    S* const shared = reinterpret_cast<S*>(channel_ring);
    const int tx = static_cast<int>(threadIdx.x) % plan.threads_x;
    const int ty = static_cast<int>(threadIdx.x) / plan.threads_x;
    const int width = plan.threads_x * kLanes;
    __syncthreads();
    if (ty < plan.threads_y) {
#pragma unroll
      for (int v = 0; v < kValues; ++v) {
        S* const to = shared + (v * plan.threads_y + ty) * width + tx * kLanes;
        *reinterpret_cast<Vec<S, kLanes>*>(to) =
            *reinterpret_cast<const Vec<S, kLanes>*>(values[v]);
      }
    }
    __syncthreads();
    for (int column = threadIdx.x; column < width; column += kChannelThreads) {
      const int64_t at = int64_t{blockIdx.x} * width + column;
      if (at >= plan.columns) return;
      S sums[kValues] = {};
#pragma unroll 4
      for (int row = 0; row < plan.threads_y; ++row) {
#pragma unroll
        for (int v = 0; v < kValues; ++v)
          sums[v] += shared[(v * plan.threads_y + row) * width + column];
      }
      use(at, sums);
    }
  } else {
    S sums[kValues] = {};
#pragma unroll
    for (int v = 0; v < kValues; ++v) {
#pragma unroll
      for (int i = 0; i < kLanes; ++i) sums[v] += values[v][i];
      sums[v] = reduce_block(sums[v]);
    }
    if (threadIdx.x == 0) use(int64_t{blockIdx.x}, sums);
  }
}

}  // namespace
}  // namespace torchkiln::cuda
