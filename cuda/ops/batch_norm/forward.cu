#include "forward.cuh"

namespace torchkiln::cuda {
namespace {

constexpr int kMergeThreads = 1024;

__device__ __forceinline__ void write_parameter(void* to, int64_t at, double value, Dtype dtype) {
  reduce::Result{to, dtype, 1}.store(at, value);
}

__device__ __forceinline__ void move_running(const RunningStatistic& running, int64_t channel,
                                             double value, double momentum, Dtype dtype) {
  if (running.data == nullptr) return;
  const int64_t at = channel * running.stride;
  const auto before = read_parameter<double>(running.data, at, dtype);
  write_parameter(running.data, at, momentum * value + (1 - momentum) * before, dtype);
}

template <class C>
__global__ void __launch_bounds__(kMergeThreads)
    merge_parts(BatchNorm p, const Moments* partial, int64_t parts) {
  constexpr int kWarps = kMergeThreads / kWarpLanes;
  const int lane = threadIdx.x % kWarpLanes, warp = threadIdx.x / kWarpLanes;
  const int64_t channel = int64_t{blockIdx.x} * kWarpLanes + lane;
  __shared__ Moments shared[kWarps][kWarpLanes];
  Moments merged{};
  wait_for_previous_kernel();
  if (channel < p.layout.channels) {
#pragma unroll 4
    for (int64_t part = warp; part < parts; part += kWarps)
      merged.merge(partial[part * p.layout.channels + channel]);
  }
  shared[warp][lane] = merged;
  for (int half = kWarps / 2; half > 0; half /= 2) {
    __syncthreads();
    if (warp >= half) continue;
    merged.merge(shared[warp + half][lane]);
    shared[warp][lane] = merged;
  }
  if (warp > 0 || channel >= p.layout.channels) return;
  C* const to = static_cast<C*>(p.statistics) + channel;
  const C mean = static_cast<C>(merged.mean);
  to[0] = mean;
  to[p.layout.channels] = static_cast<C>(merged.mean - static_cast<double>(mean));
  to[2 * p.layout.channels] = static_cast<C>(1 / sqrt(merged.squares / merged.count + p.eps));
  move_running(p.running_mean, channel, merged.mean, p.momentum, p.running_dtype);
  move_running(p.running_var, channel, merged.squares / (merged.count - 1), p.momentum,
               p.running_dtype);
}

template <class T>
__global__ void __launch_bounds__(kChannelThreads)
    pack_signs_of(const T* y, uint8_t* signs, int64_t numel) {
  wait_for_previous_kernel();
  const int64_t byte = int64_t{blockIdx.x} * kChannelThreads + threadIdx.x;
  if (byte * 8 >= numel) return;
  unsigned bits = 0;
  for (int i = 0; i < 8 && byte * 8 + i < numel; ++i) {
    const auto value = convert<Compute<T>>(y[byte * 8 + i]);
    bits |= static_cast<unsigned>(!(value <= 0)) << i;
  }
  signs[byte] = static_cast<uint8_t>(bits);
}

}  // namespace

Status merge_moments(const BatchNorm& p, const Moments* partial, int64_t parts,
                     CUstream_st* stream) {
  Grid grid;
  grid.blocks = dim3(static_cast<unsigned>(ceil_div(p.layout.channels, kWarpLanes)));
  grid.threads = kMergeThreads;
  return p.dtype == Dtype::float64
             ? launch_overlapped(merge_parts<double>, grid, stream, p, partial, parts)
             : launch_overlapped(merge_parts<float>, grid, stream, p, partial, parts);
}

Status pack_signs(const BatchNorm& p, CUstream_st* stream) {
  const int64_t numel = p.layout.numel();
  const int64_t blocks = ceil_div(ceil_div(numel, 8), kChannelThreads);
  if (blocks > kMaxGridX) return {"too many elements for one launch"};
  Grid grid;
  grid.blocks = dim3(static_cast<unsigned>(blocks));
  grid.threads = kChannelThreads;
  return dispatch_floating(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return launch_overlapped(pack_signs_of<T>, grid, stream, static_cast<const T*>(p.y), p.signs,
                             numel);
  });
}

Status batch_norm(const BatchNorm& p, Allocate allocate, CUstream_st* stream) {
  return p.layout.inner == 1 ? batch_norm_rows(p, allocate, stream)
                             : batch_norm_planes(p, allocate, stream);
}

}  // namespace torchkiln::cuda
