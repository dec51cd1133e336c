// Adjacent channels of few pixels, with many channels in a group: the groups of a pixel are
// adjacent in memory. Their moments are those of channels of batch norm; a third kernel merges them
// over the pixels, and part_outputs(), forward_parts.cu, computes y.

#include "factors.cuh"
#include "launch.cuh"
#include "ops/batch_norm/forward.cuh"

namespace torchkiln::cuda {
namespace {

/// Writes the statistics of each group, one per thread. `moments`: the means of all groups of
/// pixels, then their sums of squares. All these groups have equally many elements.
template <class C>
__global__ void __launch_bounds__(kMergeThreads) merge_pixels(GroupNorm p, const double* moments) {
  wait_for_previous_kernel();
  const int64_t group = group_of_thread(), all = p.layout.all_groups();
  if (group >= all) return;
  const int64_t sample = group / p.layout.groups, pixels = p.layout.inner;
  const double* const means =
      moments + sample * pixels * p.layout.groups + (group - sample * p.layout.groups);
  const double* const squares_of = means + all * pixels;
  const auto count = static_cast<double>(p.layout.channels_per_group());
  const double origin = means[0];
  double sum = 0, squares = 0;
#pragma unroll 4
  for (int64_t at = 0; at < pixels * p.layout.groups; at += p.layout.groups) {
    const double distance = means[at] - origin;
    sum += distance;
    squares += squares_of[at] + count * distance * distance;
  }
  const Moments merged =
      Moments::from_sums(count * static_cast<double>(pixels), origin, count * sum, squares);
  write_statistics<C>(p.statistics, all, group, merged, p.eps);
}

}  // namespace

Status group_norm_of_pixels(const GroupNorm& p, const GroupNormPlan& plan, Allocate allocate,
                            CUstream_st* stream) {
  GroupNorm pixels = p;
  pixels.layout = pixels_of(p.layout);
  BatchNorm groups = moments_of_groups(p, plan.moments);
  const auto numbers = static_cast<size_t>(2 * groups.layout.channels + 1);
  groups.moments = static_cast<double*>(allocate(numbers * sizeof(double)));
  Status status = moments_of(groups, plan.moments, allocate, stream);
  if (!status.ok()) return status;
  const Grid grid{dim3(static_cast<unsigned>(ceil_div(p.layout.all_groups(), kMergeThreads))),
                  dim3(kMergeThreads)};
  status = dispatch_floating(p.dtype, [&](auto tag) {
    using C = Compute<typename decltype(tag)::type>;
    return launch_overlapped(merge_pixels<C>, grid, stream, p,
                             static_cast<const double*>(groups.moments));
  });
  if (!status.ok()) return status;
  return group_outputs_of_parts(pixels, *plan.parts, p.layout.inner, stream);
}

}  // namespace torchkiln::cuda
