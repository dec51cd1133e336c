#include "forward.cuh"
#include "total.cuh"

namespace torchkiln::cuda {
namespace {

__device__ __forceinline__ void write_parameter(void* to, int64_t at, double value, Dtype dtype) {
  reduce::Result{to, dtype, 1}.store(at, value);
}

__device__ __forceinline__ double read_running(const RunningStatistic& running, int64_t channel,
                                               Dtype dtype) {
  if (running.data == nullptr) return 0;
  return read_parameter<double>(running.data, channel * running.stride, dtype);
}

__device__ __forceinline__ void move_running(const RunningStatistic& running, int64_t channel,
                                             double before, double value, double momentum,
                                             Dtype dtype) {
  if (running.data == nullptr) return;
  write_parameter(running.data, channel * running.stride,
                  momentum * value + (1 - momentum) * before, dtype);
}

template <class C>
__device__ __forceinline__ void write_statistics(void* statistics, int64_t channels,
                                                 int64_t channel, const Moments& moments,
                                                 double eps) {
  C* const to = static_cast<C*>(statistics) + channel;
  const C mean = static_cast<C>(moments.mean);
  to[0] = mean;
  to[channels] = static_cast<C>(moments.mean - static_cast<double>(mean));
  to[2 * channels] = static_cast<C>(1 / sqrt(moments.squares / moments.count + eps));
}

/// Merges the parts of kChannelsOfTotal channels in a block: sums of the distances of their means
/// to the first one.
template <class C>
__global__ void __launch_bounds__(kTotalThreads)
    merge_parts(BatchNorm p, const Moments* partial, int64_t parts, int64_t columns) {
  wait_for_previous_kernel();
  const int64_t channels = p.layout.channels;
  const ChannelParts own(parts, columns, columns, channels);
  const int64_t channel = own.channel();
  const bool inside = channel < channels;
  double origin = 0, running_mean = 0, running_var = 0, sums[3] = {};
  if (inside) {
    running_mean = read_running(p.running_mean, channel, p.running_dtype);
    running_var = read_running(p.running_var, channel, p.running_dtype);
    origin = partial[own.at(0)].mean;
    own.each<Moments>([&](int64_t at) { return partial[at]; },
                      [&](const Moments& each) {
                        const double distance = each.count == 0 ? 0 : each.mean - origin;
                        sums[0] += each.count;
                        sums[1] += each.count * distance;
                        sums[2] += each.squares + each.count * distance * distance;
                      });
  }
  if (!add_total(own, sums) || !inside) return;
  const Moments merged = Moments::from_sums(sums[0], origin, sums[1], sums[2]);
  if (p.moments != nullptr) {
    p.moments[channel] = merged.mean;
    p.moments[channels + channel] = merged.squares;
    if (channel == 0) p.moments[2 * channels] = merged.count;
    return;
  }
  write_statistics<C>(p.statistics, channels, channel, merged, p.eps);
  move_running(p.running_mean, channel, running_mean, merged.mean, p.momentum, p.running_dtype);
  move_running(p.running_var, channel, running_var, merged.squares / (merged.count - 1), p.momentum,
               p.running_dtype);
}

template <class C>
__global__ void __launch_bounds__(kChannelThreads) merge_processes(BatchNormMerge p) {
  const int64_t channel = int64_t{blockIdx.x} * kChannelThreads + threadIdx.x;
  wait_for_previous_kernel();
  if (channel >= p.channels) return;
  double origin = 0, sums[3] = {};
#pragma unroll 4
  for (int64_t process = 0; process < p.processes; ++process) {
    const double* const from = p.moments + process * (2 * p.channels + 1);
    const Moments each{from[2 * p.channels], from[channel], from[p.channels + channel]};
    if (each.count == 0) continue;
    if (sums[0] == 0) origin = each.mean;
    const double distance = each.mean - origin;
    sums[0] += each.count;
    sums[1] += each.count * distance;
    sums[2] += each.squares + each.count * distance * distance;
  }
  const Moments merged = Moments::from_sums(sums[0], origin, sums[1], sums[2]);
  if (channel == 0) *p.count = merged.count;
  write_statistics<C>(p.statistics, p.channels, channel, merged, p.eps);
  if (merged.count == 0) return;
  const double momentum = p.batches == nullptr ? p.momentum : 1 / static_cast<double>(*p.batches);
  move_running(p.running_mean, channel, read_running(p.running_mean, channel, p.running_dtype),
               merged.mean, momentum, p.running_dtype);
  move_running(p.running_var, channel, read_running(p.running_var, channel, p.running_dtype),
               merged.squares / (merged.count - 1), momentum, p.running_dtype);
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

Status merge_moments(const BatchNorm& p, const Moments* partial, int64_t parts, int64_t columns,
                     CUstream_st* stream) {
  Grid grid;
  grid.blocks = dim3(static_cast<unsigned>(ceil_div(p.layout.channels, kChannelsOfTotal)));
  grid.threads = kTotalThreads;
  return p.dtype == Dtype::float64
             ? launch_overlapped(merge_parts<double>, grid, stream, p, partial, parts, columns)
             : launch_overlapped(merge_parts<float>, grid, stream, p, partial, parts, columns);
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

Status batch_norm_moments(const BatchNorm& p, Allocate allocate, CUstream_st* stream) {
  return p.layout.inner == 1 || folds_planes(p.layout) ? moments_of_rows(p, allocate, stream)
                                                       : moments_of_planes(p, allocate, stream);
}

Status batch_norm_merge(const BatchNormMerge& p, CUstream_st* stream) {
  Grid grid;
  grid.blocks = dim3(static_cast<unsigned>(ceil_div(p.channels, kChannelThreads)));
  grid.threads = kChannelThreads;
  return p.dtype == Dtype::float64 ? launch_overlapped(merge_processes<double>, grid, stream, p)
                                   : launch_overlapped(merge_processes<float>, grid, stream, p);
}

Status batch_norm_outputs(const BatchNorm& p, CUstream_st* stream) {
  return p.layout.inner == 1 || folds_planes(p.layout) ? outputs_of_rows(p, stream)
                                                       : outputs_of_planes(p, stream);
}

Status batch_norm(const BatchNorm& p, Allocate allocate, CUstream_st* stream) {
  if (p.training) {
    const Status status = batch_norm_moments(p, allocate, stream);
    if (!status.ok()) return status;
  }
  return batch_norm_outputs(p, stream);
}

}  // namespace torchkiln::cuda
