// y = activation(n * weight + bias + residual) with n normalized over a channel of all samples.
//
//   plan       kernels                                     when
//   resident   one cooperative kernel for both passes,     training on 9.0, adjacent channels in
//              forward_resident.cu                         vectors, no residual and no signs
//   rows       moments, merge, y: forward_rows.cu          adjacent channels, and small planes that
//                                                          fold to rows of all channels
//   planes     moments, merge, y: forward_planes.cu        channels of adjacent elements
//   whole      one kernel for both passes: the files of    training, channels that one block reads
//              rows and planes                             alone, few elements each in rows
//
// In eval mode y is the only kernel. forward.cuh has the kernels of rows and planes, channels.cuh
// the elements of each thread, factors.cuh n, pool.cu batch norm with a max pool. Gradients:
// backward.cu.

#include "forward.cuh"
#include "statistics.cuh"
#include "total.cuh"

namespace torchkiln::cuda {
namespace {

/// Merges the parts of each channel: sums the distances of the parts' means from the mean of the
/// first part.
template <class C, int kThreads>
__global__ void __launch_bounds__(kChannelTotalThreads)
    merge_parts(BatchNorm p, const Moments* partial, int64_t parts, int64_t columns) {
  wait_for_previous_kernel();
  const int64_t channels = p.layout.channels;
  const ChannelParts<kThreads> own(parts, columns, columns, channels);
  const int64_t channel = own.channel();
  const bool inside = channel < channels;
  const RunningValues before(p, inside ? channel : 0);
  double origin = 0, sums[3] = {};
  if (inside) {
    origin = partial[own.at(0)].mean;
    own.template each<Moments>([&](int64_t at) { return partial[at]; },
                               [&](const Moments& each) { add_distances(each, origin, sums); });
  }
  if (!add_total(own, sums) || !inside) return;
  const Moments merged = Moments::from_sums(sums[0], origin, sums[1], sums[2]);
  if (p.moments != nullptr) {
    p.moments[channel] = merged.mean;
    p.moments[channels + channel] = merged.squares;
    if (channel == 0) p.moments[2 * channels] = merged.count;
    return;
  }
  finish_statistics<C>(p, channel, before, merged);
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
    add_distances(each, origin, sums);
  }
  const Moments merged = Moments::from_sums(sums[0], origin, sums[1], sums[2]);
  if (channel == 0) *p.count = merged.count;
  write_statistics<C>(p.statistics, p.channels, channel, merged, p.eps);
  if (merged.count == 0) return;
  const double momentum = p.batches == nullptr ? p.momentum : 1 / static_cast<double>(*p.batches);
  move_running(p, channel, RunningValues(p, channel), merged, momentum);
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

Status outputs_of(const BatchNorm& p, const ChannelPass& pass, CUstream_st* stream) {
  return pass.in_rows ? outputs_of_rows(p, pass, stream) : outputs_of_planes(p, pass, stream);
}

}  // namespace

Status merge_moments(const BatchNorm& p, const Moments* partial, int64_t parts, int64_t columns,
                     CUstream_st* stream) {
  const int64_t terms = parts * (columns / p.layout.channels);
  return with_threads_of_total(p.layout.channels, terms, [&](auto threads, const Grid& grid) {
    constexpr int kThreads = decltype(threads)::value;
    const auto kernel =
        p.dtype == Dtype::float64 ? merge_parts<double, kThreads> : merge_parts<float, kThreads>;
    return launch_overlapped(kernel, grid, stream, p, partial, parts, columns);
  });
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

Status moments_of(const BatchNorm& p, const ChannelPass& pass, Allocate allocate,
                  CUstream_st* stream) {
  return pass.in_rows ? moments_of_rows(p, pass, allocate, stream)
                      : moments_of_planes(p, pass, allocate, stream);
}

Status batch_norm_moments(const BatchNorm& p, Allocate allocate, CUstream_st* stream) {
  return moments_of(p, choose_moments(p, current_device()), allocate, stream);
}

Status batch_norm_merge(const BatchNormMerge& p, CUstream_st* stream) {
  Grid grid;
  grid.blocks = dim3(static_cast<unsigned>(ceil_div(p.channels, kChannelThreads)));
  grid.threads = kChannelThreads;
  return p.dtype == Dtype::float64 ? launch_overlapped(merge_processes<double>, grid, stream, p)
                                   : launch_overlapped(merge_processes<float>, grid, stream, p);
}

Status batch_norm_outputs(const BatchNorm& p, CUstream_st* stream) {
  return outputs_of(p, choose_outputs(p, current_device()), stream);
}

Status batch_norm(const BatchNorm& p, Allocate allocate, CUstream_st* stream) {
  const BatchNormPlan plan = choose(p, current_device());
  if (plan.resident) return launch_resident(p, *plan.resident, allocate, stream);
  if (plan.moments) {
    const Status status = moments_of(p, *plan.moments, allocate, stream);
    if (!status.ok()) return status;
  }
  return outputs_of(p, *plan.outputs, stream);
}

}  // namespace torchkiln::cuda
