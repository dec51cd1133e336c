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

/// Each block computes the totals of a group of a sample: for each channel the sums of g and of g *
/// n, in `totals` [2, batch * channels], and the coefficients of grad_x.
template <class C>
__global__ void __launch_bounds__(kTotalThreads)
    add_group(GroupNormBackward p, GroupParts parts, double* totals, C* coefficients) {
  wait_for_previous_kernel();
  const GroupLayout& layout = p.layout;
  const int64_t group = blockIdx.x, all = layout.all_groups();
  const int64_t sample = group / layout.groups, channels = layout.channels_per_group();
  const int64_t first = (group - sample * layout.groups) * channels;
  const C* const statistics = static_cast<const C*>(p.statistics) + group;
  const auto low = static_cast<double>(statistics[all]);
  const auto rstd = static_cast<double>(statistics[2 * all]);
  int width = 1;
  while (width < 32 && width < channels) width *= 2;
  const int slices = kTotalThreads / width;
  const int slice = static_cast<int>(threadIdx.x) / width;
  const C* const sums = static_cast<const C*>(parts.sums) + sample * parts.samples;
  double of_group[2] = {};
  for (int64_t begin = 0; begin < channels; begin += width) {
    const int64_t within = begin + static_cast<int>(threadIdx.x) % width;
    const int64_t channel = first + within;
    double total[2] = {};
    if (within < channels) {
#pragma unroll 4
      for (int64_t part = slice; part < parts.count; part += slices) {
        const C* const from = sums + channel * parts.channels + part * parts.parts;
        total[0] += static_cast<double>(from[0]);
        total[1] += static_cast<double>(from[parts.second]);
      }
    }
    if (!add_slices(total, width) || within >= channels) continue;
    total[1] = (total[1] - low * total[0]) * rstd;
    const int64_t at = sample * layout.channels + channel;
    totals[at] = total[0];
    totals[layout.batch * layout.channels + at] = total[1];
    const double weight =
        p.weight == nullptr ? 1 : read_parameter<double>(p.weight, channel, p.parameter_dtype);
    of_group[0] += weight * total[0];
    of_group[1] += weight * total[1];
  }
  if (!add_slices(of_group, 1)) return;
  const auto count = static_cast<double>(layout.count());
  const double slope = of_group[1] * rstd * rstd / count;
  coefficients[group] = static_cast<C>(slope);
  coefficients[all + group] = static_cast<C>(of_group[0] * rstd / count - slope * low);
}

/// The gradients of weight and bias: sums over the samples, a warp's width of channels per block.
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
  const Grid of_groups{dim3(static_cast<unsigned>(groups)), kTotalThreads};
  status = p.dtype == Dtype::float64
               ? launch_overlapped(add_group<double>, of_groups, stream, p, parts, totals,
                                   static_cast<double*>(coefficients))
               : launch_overlapped(add_group<float>, of_groups, stream, p, parts, totals,
                                   static_cast<float*>(coefficients));
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
