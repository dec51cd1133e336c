// One exchange between the threads instead of two: each takes a mean of its own, and the means and
// squares of two parts of a row merge into those of both.
#include "row.cuh"

using torchkiln::device::kWarpLanes;
using torchkiln::device::reduce_warp;

// Combines parts of a row: count, mean, and sum of the squares around that mean.
struct Merge {
  static __device__ void clear(float (&a)[3]) { a[0] = a[1] = a[2] = 0; }
  __device__ void operator()(float (&a)[3], const float (&b)[3]) const {
    const float count = a[0] + b[0];
    if (count == 0) return;
    const float share = b[0] / count, distance = b[1] - a[1];
    a[2] += b[2] + distance * distance * a[0] * share;
    a[1] += distance * share;
    a[0] = count;
  }
};

template <class T, int kVectors>
__global__ void __launch_bounds__(kThreads)
    layer_norm(const T* x, const T* weight, const T* bias, T* y, int columns, float eps) {
  constexpr int kWarps = kThreads / kWarpLanes;
  __shared__ float of_warps[kWarps][3];
  const int64_t first = int64_t{blockIdx.x} * columns;
  const Row<T, kVectors> row(x + first, columns);
  float part[3] = {};
  row.for_each([&](int, const auto& values) {
    for (const float value : values) part[1] += value;
    part[0] += Row<T, kVectors>::kLanes;
  });
  if (part[0] > 0) part[1] /= part[0];
  row.for_each([&](int, const auto& values) {
    for (const float value : values) part[2] += (value - part[1]) * (value - part[1]);
  });
  reduce_warp(part, Merge{});
  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  if (lane < 3) of_warps[warp][lane] = lane == 0 ? part[0] : lane == 1 ? part[1] : part[2];
  __syncthreads();
  for (int i = 0; i < 3; ++i) part[i] = of_warps[lane % kWarps][i];
  reduce_warp(part, Merge{}, kWarps);
  row.write(part[1], rsqrtf(part[2] / columns + eps), weight, bias, y + first);
}
