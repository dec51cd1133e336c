// A block adds up in shared memory, half of the threads at a time, then once to the result.
#include <cstdint>

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) sum(const float* x, float* out, int64_t n) {
  __shared__ float parts[kThreads];
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  parts[threadIdx.x] = i < n ? x[i] : 0.0f;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) parts[threadIdx.x] += parts[threadIdx.x + half];
  }
  if (threadIdx.x == 0) atomicAdd(out, parts[0]);
}
