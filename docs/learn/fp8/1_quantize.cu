// E4M3 with a scale, a power of two, for each 128 elements of a row. k is a multiple of 128.
#include <cuda_fp8.h>
#include <torchkiln/core/fp8.h>
#include <torchkiln/device/vec.cuh>
#include <torchkiln/device/warp.cuh>

using namespace torchkiln;

// 16 lanes share a block of 128 elements: each reads 16 bytes and writes 8.
__global__ void quantize(const __nv_bfloat16* x, __nv_fp8_e4m3* data, float* scale, int rows,
                         int k) {
  constexpr int kLanes = 8, kSharing = 16;
  const int64_t at = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) * kLanes;
  const bool inside = at < int64_t{rows} * k;
  float values[kLanes] = {}, largest = 0;
  if (inside) device::widen(device::load_vector<kLanes>(x + at), values);
#pragma unroll
  for (const float value : values) largest = fmaxf(largest, fabsf(value));
  largest = device::reduce_warp(largest, device::Max{}, kSharing);
  const uint32_t exponent = fp8_scale_exponent(__float_as_uint(largest));
  const float reciprocal = __uint_as_float(fp8_reciprocal_bits(exponent));
  uint16_t pairs[kLanes / 2];
#pragma unroll
  for (int i = 0; i < kLanes / 2; ++i) {
    const float2 both = {values[2 * i] * reciprocal, values[2 * i + 1] * reciprocal};
    pairs[i] = __nv_cvt_float2_to_fp8x2(both, __NV_SATFINITE, __NV_E4M3);
  }
  if (!inside) return;
  *reinterpret_cast<uint2*>(data + at) = {pairs[0] | uint32_t{pairs[1]} << 16,
                                          pairs[2] | uint32_t{pairs[3]} << 16};
  if (threadIdx.x % kSharing == 0) {
    const int64_t row = at / k, block = at % k / (kLanes * kSharing);
    scale[block * rows + row] = __uint_as_float(fp8_scale_bits(exponent));
  }
}
