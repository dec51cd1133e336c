// A pipeline of copies: tiles of the next steps arrive while this step is multiplied.
// m and n are multiples of 128, k of 32.
#include <cuda_pipeline_primitives.h>

#include "mma.cuh"

constexpr int kSide = 128, kDepth = 32, kThreads = 256, kStages = 4;
constexpr int kPitch = kDepth + 8;
using Tile = __nv_bfloat16[kSide][kPitch];
struct Stage {
  Tile a, b;
};

// Starts the copies of a tile. They go to shared memory without passing through registers.
__device__ void start_copy(Tile& to, const __nv_bfloat16* from, int k) {
#pragma unroll
  for (int i = threadIdx.x; i < kSide * kDepth / 8; i += kThreads) {
    const int row = i / 4, depth = i % 4 * 8;
    __pipeline_memcpy_async(&to[row][depth], from + int64_t{row} * k + depth, 16);
  }
}

__global__ void __launch_bounds__(kThreads, 2)
    product(const __nv_bfloat16* a, const __nv_bfloat16* b, __nv_bfloat16* c, int m, int n, int k) {
  extern __shared__ __align__(16) unsigned char memory[];
  Stage* const stages = reinterpret_cast<Stage*>(memory);
  a += int64_t{blockIdx.y} * kSide * k;
  b += int64_t{blockIdx.x} * kSide * k;
  const int steps = k / kDepth;
  const auto start = [&](int step) {
    if (step < steps) {
      start_copy(stages[step % kStages].a, a + step * kDepth, k);
      start_copy(stages[step % kStages].b, b + step * kDepth, k);
    }
    __pipeline_commit();  // a batch per step, empty ones included
  };
  WarpTile<kPitch> results(threadIdx.x / 32);
  for (int step = 0; step < kStages - 1; ++step) start(step);
  for (int step = 0; step < steps; ++step) {
    __pipeline_wait_prior(kStages - 2);  // the batch of this step has arrived
    __syncthreads();                     // for all threads; and the previous stage has been read
    start(step + kStages - 1);           // into the previous stage
    const Stage& stage = stages[step % kStages];
#pragma unroll
    for (int depth = 0; depth < kDepth; depth += 16) results.add(stage.a, stage.b, depth);
  }
  results.store(c + int64_t{blockIdx.y} * kSide * n + blockIdx.x * kSide, n);
}
