// As many blocks as run at the same time; each thread loops, with 64 bytes in flight.
#include "load.cuh"

__global__ void __launch_bounds__(kThreads) sum(const float* x, float* out, int64_t n) {
  const float total = torchkiln::device::reduce_block(sum_share(x, n));
  if (threadIdx.x == 0) atomicAdd(out, total);
}
