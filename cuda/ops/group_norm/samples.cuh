#pragma once

// Sums over the samples for the gradients of weight and bias and, in the same pass, sums of each
// group of a sample. A warp has a tile of adjacent elements and reads it from one sample after
// another.

#include "launch.cuh"
#include "sums.cuh"
#include "teams.cuh"

namespace torchkiln::cuda {
namespace {

/// The tiles of a sample; see GroupSamplesPlan.
struct SampleTiles {
  Divisor inner;    // elements of a channel
  Divisor of_span;  // tiles of a span
  int64_t span;
  int64_t count;  // tiles per sample
  int rows;
};

/// For each element of a sample, adds g and g * n over the samples, where g is the gradient of the
/// activation's argument and n the normalized x. The sums go to `partial` [parts, 2, elements]. If
/// `partial` is null, they are the gradients of bias and weight. Block (x, y) has tiles of the
/// elements and every parts-th group of samples. With kGroups a span is a group, and `of_groups`
/// [groups of all samples, tiles, 2] receives two sums over each tile: of weight * g, and of
/// weight * g * (x - mean).
template <class T, int kLanes, bool kGroups, class Act>
__global__ void __launch_bounds__(kSampleThreads, 2)
    sample_sums(GroupNormBackward p, SampleTiles tiles, Act act, Compute<T>* partial,
                Compute<T>* of_groups) {
  using C = Compute<T>;
  using Vector = Vec<T, kLanes>;
  constexpr int kWarps = kSampleThreads / kWarpLanes;
  __shared__ C shared[kWarps][2][kLanes][kWarpLanes];
  wait_for_previous_kernel();
  const GroupLayout& layout = p.layout;
  const int64_t elements = layout.channels * layout.inner, all = layout.all_groups();
  const int rows = kGroups ? tiles.rows : kWarps;
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const int row = warp % rows;
  const int64_t tile = int64_t{blockIdx.x} * (kWarps / rows) + warp / rows;
  const uint32_t span = tiles.of_span.quotient(static_cast<uint32_t>(tile));
  const int64_t of_span = tile - int64_t{span} * tiles.of_span.divisor();
  const int64_t place = (of_span * kWarpLanes + lane) * kLanes;
  const int64_t at = span * tiles.span + place;
  const bool has_tile = tile < tiles.count, inside = has_tile && place < tiles.span;
  C sums[2][kLanes] = {};
  if (kGroups ? has_tile : inside) {
    int64_t channels[kLanes];
    C weight[kLanes], bias[kLanes];
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      channels[i] = inside ? tiles.inner.quotient(static_cast<uint32_t>(at + i)) : 0;
      weight[i] = C(1), bias[i] = C(0);
    }
    if (p.weight != nullptr) read_parameters(p.weight, channels, p.parameter_dtype, weight);
    if (p.bias != nullptr) read_parameters(p.bias, channels, p.parameter_dtype, bias);
    const int64_t group = kGroups ? span : channels[0] / layout.channels_per_group();
    const T* const xs = static_cast<const T*>(p.x) + at;
    const T* const grads = static_cast<const T*>(p.grad) + at;
    const C* const statistics = static_cast<const C*>(p.statistics) + group;
    const auto add = [&](int64_t sample, const Vector& x, const Vector& grad,
                         const C(&numbers)[3]) {
      const C mean = numbers[0], low = numbers[1], rstd = numbers[2];
      C g[kLanes], from_mean[kLanes], scale[kLanes];
      differentiate(act, mean, low, rstd, x, grad, weight, bias, g, from_mean, scale);
      C of_group[2] = {};
#pragma unroll
      for (int i = 0; i < kLanes; ++i) {
        sums[0][i] += g[i];
        sums[1][i] = fma(g[i], (from_mean[i] - low) * rstd, sums[1][i]);
        const C product = inside ? weight[i] * g[i] : C(0);
        of_group[0] += product;
        of_group[1] = fma(product, from_mean[i], of_group[1]);
      }
      if constexpr (kGroups) {
        reduce_warp(of_group, Sum{});
        const int64_t to = (sample * layout.groups + group) * tiles.of_span.divisor() + of_span;
        if (lane == 0) store(of_groups + 2 * to, of_group);
      }
    };
    const auto load = [&](int64_t sample, Vector& x, Vector& grad, C(&numbers)[3]) {
      if (!kGroups || inside) {
        x = load_vector<kLanes>(xs + sample * elements);
        grad = load_vector<kLanes>(grads + sample * elements);
      }
#pragma unroll
      for (int i = 0; i < 3; ++i) numbers[i] = statistics[i * all + sample * layout.groups];
    };
    const int64_t step = int64_t{gridDim.y} * rows;
    int64_t sample = int64_t{blockIdx.y} * rows + row;
    // Loads are issued in groups, because the compiler does not move a load before a store.
    constexpr int kLoads = !Act::kIsFixed ? 1 : kGroups ? kVectorsInFlight<Vector, Act> : 4;
    for (; sample < layout.batch; sample += kLoads * step) {
      Vector x[kLoads] = {}, grad[kLoads] = {};
      C numbers[kLoads][3];
#pragma unroll
      for (int k = 0; k < kLoads; ++k)
        if (sample + k * step < layout.batch) load(sample + k * step, x[k], grad[k], numbers[k]);
#pragma unroll
      for (int k = 0; k < kLoads; ++k)
        if (sample + k * step < layout.batch) add(sample + k * step, x[k], grad[k], numbers[k]);
    }
  }
#pragma unroll
  for (int v = 0; v < 2; ++v) {
#pragma unroll
    for (int i = 0; i < kLanes; ++i) shared[warp][v][i][lane] = sums[v][i];
  }
  __syncthreads();
  if (!inside) return;
  for (int v = row; v < 2 * kLanes; v += rows) {
    const int which = v / kLanes, i = v % kLanes;
    C total = 0;
#pragma unroll
    for (int k = 0; k < kWarps; ++k)
      if (k < rows) total += shared[warp - row + k][which][i][lane];
    if (partial != nullptr) {
      partial[(int64_t{blockIdx.y} * 2 + which) * elements + at + i] = total;
    } else if (void* const to = which == 0 ? p.grad_bias : p.grad_weight; to != nullptr) {
      reduce::Result{to, p.parameter_dtype, 1}.store(at + i, static_cast<double>(total));
    }
  }
}

/// Channels of a block that adds `terms` numbers per channel, `inner` of which are adjacent.
/// Adjacent threads read adjacent elements if there are many of them, otherwise adjacent channels.
inline int channels_of_block(int64_t inner, int64_t terms) {
  int channels = kWarpLanes;
  while (channels > 1 && channels * inner > kWarpLanes) channels /= 2;
  while (kTotalThreads / channels >= 2 * terms) channels *= 2;
  return channels;
}

/// The gradients of weight and bias: sums over the parts and the elements of a channel.
template <class C>
__global__ void __launch_bounds__(kTotalThreads)
    add_elements(GroupNormBackward p, Divisor inner, const C* partial, int parts, int width) {
  wait_for_previous_kernel();
  const int64_t channels = p.layout.channels, elements = channels * p.layout.inner;
  const int64_t channel = int64_t{blockIdx.x} * width + static_cast<int>(threadIdx.x) % width;
  const int terms = parts * static_cast<int>(inner.divisor());
  double total[2] = {};
  if (channel < channels) {
    constexpr int kLoads = 8;
    const int step = kTotalThreads / width;
    for (int i = static_cast<int>(threadIdx.x) / width; i < terms; i += kLoads * step) {
      C sums[kLoads][2] = {};
#pragma unroll
      for (int k = 0; k < kLoads; ++k) {
        if (i + k * step >= terms) continue;
        const auto term = static_cast<uint32_t>(i + k * step);
        const uint32_t part = inner.quotient(term);
        const C* const from = partial + int64_t{part} * 2 * elements + channel * inner.divisor() +
                              (term - part * inner.divisor());
        sums[k][0] = from[0];
        sums[k][1] = from[elements];
      }
#pragma unroll
      for (int k = 0; k < kLoads; ++k) {
        total[0] += static_cast<double>(sums[k][0]);
        total[1] += static_cast<double>(sums[k][1]);
      }
    }
  }
  if (!add_slices(total, width) || channel >= channels) return;
  store_parameter_gradients(p, channel, total);
}

/// `of_groups`: null for the gradients of weight and bias only.
template <class T, int kLanes, bool kGroups, class Act>
Status launch_sample_sums(const GroupNormBackward& p, const GroupSamplesPlan& plan, const Act& act,
                          Allocate allocate, CUstream_st* stream, Compute<T>* of_groups) {
  using C = Compute<T>;
  const int64_t elements = p.layout.channels * p.layout.inner;
  const bool adds = plan.parts * p.layout.inner > 1;
  C* partial = nullptr;
  if (adds)
    partial = static_cast<C*>(allocate(static_cast<size_t>(2 * plan.parts * elements) * sizeof(C)));
  const int64_t blocks = ceil_div(plan.tiles(), kSampleThreads / kWarpLanes / plan.rows);
  const Grid of_samples{dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(plan.parts)),
                        kSampleThreads};
  const Divisor inner(static_cast<uint32_t>(p.layout.inner));
  const SampleTiles tiles{inner, Divisor(static_cast<uint32_t>(plan.tiles_of_span)), plan.span,
                          plan.tiles(), plan.rows};
  const Status status = launch_overlapped(sample_sums<T, kLanes, kGroups, Act>, of_samples, stream,
                                          p, tiles, act, partial, of_groups);
  if (!status.ok() || !adds || (p.grad_weight == nullptr && p.grad_bias == nullptr)) return status;
  const int width = channels_of_block(p.layout.inner, plan.parts * p.layout.inner);
  const Grid of_channels{dim3(static_cast<unsigned>(ceil_div(p.layout.channels, width))),
                         kTotalThreads};
  return launch_overlapped(add_elements<C>, of_channels, stream, p, inner,
                           static_cast<const C*>(partial), static_cast<int>(plan.parts), width);
}

}  // namespace
}  // namespace torchkiln::cuda
