// x = data * scale, with a scale for each 128 elements of a row. k is a multiple of 128.
#include <cuda_fp8.h>
#include <torchkiln/device/vec.cuh>

__global__ void dequantize(const __nv_fp8_e4m3* data, const float* scale, __nv_bfloat16* x,
                           int rows, int k) {
  constexpr int kLanes = 8;
  const int64_t at = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) * kLanes;
  if (at >= int64_t{rows} * k) return;
  const float by = scale[at % k / 128 * rows + at / k];
  const uint2 bytes = *reinterpret_cast<const uint2*>(data + at);
  float values[kLanes];
#pragma unroll
  for (int i = 0; i < kLanes; ++i)
    values[i] = float(reinterpret_cast<const __nv_fp8_e4m3*>(&bytes)[i]) * by;
  torchkiln::device::store<kLanes>(x + at, values);
}
