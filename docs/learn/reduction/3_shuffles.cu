// The lanes of a warp read each other's registers; only the warps meet in shared memory.
#include <torchkiln/device/block_reduce.cuh>

#include <cstdint>

__global__ void sum(const float* x, float* out, int64_t n) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  const float total = torchkiln::device::reduce_block(i < n ? x[i] : 0.0f);
  if (threadIdx.x == 0) atomicAdd(out, total);
}
