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
  C* const to = static_cast<C*>(p.statistics) + channel;
  const C mean = static_cast<C>(merged.mean);
  to[0] = mean;
  to[channels] = static_cast<C>(merged.mean - static_cast<double>(mean));
  to[2 * channels] = static_cast<C>(1 / sqrt(merged.squares / merged.count + p.eps));
  move_running(p.running_mean, channel, running_mean, merged.mean, p.momentum, p.running_dtype);
  move_running(p.running_var, channel, running_var, merged.squares / (merged.count - 1), p.momentum,
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

Status batch_norm(const BatchNorm& p, Allocate allocate, CUstream_st* stream) {
  return p.layout.inner == 1 || folds_planes(p.layout) ? batch_norm_rows(p, allocate, stream)
                                                       : batch_norm_planes(p, allocate, stream);
}

}  // namespace torchkiln::cuda
