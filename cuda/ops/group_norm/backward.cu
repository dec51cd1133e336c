// The gradients of group norm in up to four kernels: partial sums of each channel, totals for each
// group (in this file), totals over the samples for weight and bias (in this file), and grad_x.
//
//   plan     sums                         grad_x                         when
//   teams    sample_sums, add_elements,   team_input_gradients,          as forward.cu; 64 elements
//            samples.cuh; grad_x does     backward_teams.cu              of a channel at most, or
//            not need them                                               16 samples at least
//   parts    sample_sums (of groups,      part_input_gradients,          as forward.cu; 64 elements
//            too), add_elements,          backward_parts.cu              of a channel at most, or
//            samples.cuh                                                 16 samples at least
//   planes   plane_sums,                  plane_input_gradients,         channels are planes of
//            backward_planes.cu           backward_planes.cu             adjacent elements
//   rows     row_sums, backward_rows.cu   row_input_gradients,           channels_last: adjacent
//                                         backward_rows.cu               channels
//
// No atomics: shape and device fix the order of every addition.

#include "launch.cuh"
#include "sums.cuh"

namespace torchkiln::cuda {
namespace {

/// Stores the coefficients of grad_x of a group, from its sums of weight * g and weight * g * n.
template <class C>
__device__ __forceinline__ void store_coefficients(const GroupNormBackward& p, int64_t group,
                                                   const double (&sums)[2], C* coefficients) {
  const int64_t all = p.layout.all_groups();
  const C* const statistics = static_cast<const C*>(p.statistics) + group;
  const auto low = static_cast<double>(statistics[all]);
  const auto rstd = static_cast<double>(statistics[2 * all]);
  const auto count = static_cast<double>(p.layout.count());
  const double slope = sums[1] * rstd * rstd / count;
  coefficients[group] = static_cast<C>(slope);
  coefficients[all + group] = static_cast<C>(sums[0] * rstd / count - slope * low);
}

/// Each block (x, y) computes the totals of chunk y of the channels of a group of a sample. With
/// kAlone, each thread computes those of a whole group. Writes for each channel the sums of g and
/// of g * n to `totals` [2, batch * channels]. Writes the coefficients of grad_x of a group or, if
/// several blocks share it, each block's sums over its channels to `of_chunks` [groups, gridDim.y,
/// 2].
template <class C, bool kAlone>
__global__ void __launch_bounds__(kTotalThreads)
    add_group(GroupNormBackward p, GroupParts parts, double* totals, C* coefficients,
              double* of_chunks) {
  wait_for_previous_kernel();
  const GroupLayout& layout = p.layout;
  const int64_t group = kAlone ? group_of_thread() : blockIdx.x, all = layout.all_groups();
  if (kAlone && group >= all) return;
  const int64_t sample = group / layout.groups, channels = layout.channels_per_group();
  const int64_t first = (group - sample * layout.groups) * channels;
  const C* const statistics = static_cast<const C*>(p.statistics) + group;
  const auto low = static_cast<double>(statistics[all]);
  const auto rstd = static_cast<double>(statistics[2 * all]);
  int width = 1;  // wider if there are fewer parts than slices
  while (!kAlone && width < channels && width < kTotalThreads &&
         (width < kWarpLanes || kTotalThreads / width > parts.count))
    width *= 2;
  const int slices = kAlone ? 1 : kTotalThreads / width;
  const int slice = kAlone ? 0 : static_cast<int>(threadIdx.x) / width;
  const int64_t chunk = (channels + gridDim.y - 1) / gridDim.y, from_channel = blockIdx.y * chunk;
  const int64_t end = min(from_channel + chunk, channels);
  const C* const sums = static_cast<const C*>(parts.sums) + sample * parts.samples;
  double of_group[2] = {};
  for (int64_t begin = from_channel; begin < end; begin += width) {
    const int64_t within = kAlone ? begin : begin + static_cast<int>(threadIdx.x) % width;
    const int64_t channel = first + within;
    double total[2] = {};
    if (within < end) {
#pragma unroll 4
      for (int part = slice; part < static_cast<int>(parts.count); part += slices) {
        const C* const from = sums + channel * parts.channels + part * parts.parts;
        total[0] += static_cast<double>(from[0]);
        total[1] += static_cast<double>(from[parts.second]);
      }
    }
    if ((!kAlone && !add_slices(total, width)) || within >= end) continue;
    total[1] = (total[1] - low * total[0]) * rstd;
    const int64_t at = sample * layout.channels + channel;
    totals[at] = total[0];
    totals[layout.batch * layout.channels + at] = total[1];
    const double weight =
        p.weight == nullptr ? 1 : read_parameter<double>(p.weight, channel, p.parameter_dtype);
    of_group[0] += weight * total[0];
    of_group[1] += weight * total[1];
  }
  if (!kAlone && !add_slices(of_group, 1)) return;
  if (of_chunks == nullptr) return store_coefficients(p, group, of_group, coefficients);
  double* const to = of_chunks + 2 * (group * gridDim.y + blockIdx.y);
  to[0] = of_group[0];
  to[1] = of_group[1];
}

/// Computes the coefficients of grad_x from the sums of all chunks of a group, with a block per
/// group.
template <class C>
__global__ void __launch_bounds__(kTotalThreads)
    add_chunks(GroupNormBackward p, const double* of_chunks, int64_t chunks, C* coefficients) {
  wait_for_previous_kernel();
  const int64_t group = blockIdx.x;
  double sums[2] = {};
  for (int64_t i = threadIdx.x; i < chunks; i += kTotalThreads) {
    sums[0] += of_chunks[2 * (group * chunks + i)];
    sums[1] += of_chunks[2 * (group * chunks + i) + 1];
  }
  if (add_slices(sums, 1)) store_coefficients(p, group, sums, coefficients);
}

template <class C>
Status add_groups(const GroupNormBackward& p, const GroupParts& parts, double* totals,
                  C* coefficients, Allocate allocate, CUstream_st* stream) {
  const int64_t groups = p.layout.all_groups();
  double* none = nullptr;
  if (threads_have_groups(p.layout, parts.count)) {
    const Grid grid{dim3(static_cast<unsigned>(ceil_div(groups, kTotalThreads))), kTotalThreads};
    return launch_overlapped(add_group<C, true>, grid, stream, p, parts, totals, coefficients,
                             none);
  }
  const int64_t chunks = group_chunks(p.layout, current_device());
  double* of_chunks = none;
  if (chunks > 1)
    of_chunks =
        static_cast<double*>(allocate(2 * static_cast<size_t>(groups * chunks) * sizeof(double)));
  Grid grid{dim3(static_cast<unsigned>(groups), static_cast<unsigned>(chunks)), kTotalThreads};
  const Status status = launch_overlapped(add_group<C, false>, grid, stream, p, parts, totals,
                                          coefficients, of_chunks);
  if (!status.ok() || chunks == 1) return status;
  grid.blocks.y = 1;
  return launch_overlapped(add_chunks<C>, grid, stream, p, static_cast<const double*>(of_chunks),
                           chunks, coefficients);
}

/// Computes the gradients of weight and bias: sums over the samples. A block has as many channels
/// as a warp has lanes.
__global__ void __launch_bounds__(kTotalThreads)
    add_samples(GroupNormBackward p, const double* totals) {
  wait_for_previous_kernel();
  const int64_t channels = p.layout.channels, products = p.layout.batch * channels;
  const int64_t channel =
      int64_t{blockIdx.x} * kWarpLanes + static_cast<int>(threadIdx.x) % kWarpLanes;
  double total[2] = {};
  if (channel < channels) {
#pragma unroll 4
    for (int64_t sample = threadIdx.x / kWarpLanes; sample < p.layout.batch;
         sample += kTotalThreads / kWarpLanes) {
      total[0] += totals[sample * channels + channel];
      total[1] += totals[products + sample * channels + channel];
    }
  }
  if (!add_slices(total, kWarpLanes) || channel >= channels) return;
  store_parameter_gradients(p, channel, total);
}

}  // namespace

Status group_norm_backward(const GroupNormBackward& p, Allocate allocate, CUstream_st* stream) {
  const GroupLayout& layout = p.layout;
  const int64_t groups = layout.all_groups();
  if (groups > kMaxGridX) return {"too many groups for one launch"};
  const GroupNormBackwardPlan plan = choose(p, current_device());
  if (plan.teams) return group_norm_backward_by_teams(p, *plan.teams, allocate, stream);
  if (plan.parts) return group_norm_backward_by_parts(p, *plan.parts, allocate, stream);
  GroupParts parts{};
  Status status = plan.rows ? group_sums_of_rows(p, *plan.rows, allocate, stream, parts)
                            : group_sums_of_planes(p, *plan.planes, allocate, stream, parts);
  if (!status.ok()) return status;
  const auto channels = static_cast<size_t>(layout.batch * layout.channels);
  auto* const totals = static_cast<double*>(allocate(2 * channels * sizeof(double)));
  void* const coefficients = allocate(2 * static_cast<size_t>(groups) * sizeof(double));
  status = p.dtype == Dtype::float64
               ? add_groups(p, parts, totals, static_cast<double*>(coefficients), allocate, stream)
               : add_groups(p, parts, totals, static_cast<float*>(coefficients), allocate, stream);
  if (!status.ok()) return status;
  if (p.grad_weight != nullptr || p.grad_bias != nullptr) {
    const int64_t blocks = ceil_div(layout.channels, kWarpLanes);
    if (blocks > kMaxGridX) return {"too many channels for one launch"};
    const Grid of_channels{dim3(static_cast<unsigned>(blocks)), kTotalThreads};
    status =
        launch_overlapped(add_samples, of_channels, stream, p, static_cast<const double*>(totals));
    if (!status.ok()) return status;
  }
  if (p.grad_x == nullptr) return status;
  return plan.rows ? group_input_gradients_of_rows(p, *plan.rows, coefficients, stream)
                   : group_input_gradients_of_planes(p, *plan.planes, coefficients, stream);
}

}  // namespace torchkiln::cuda
