// y = activation(n * weight + bias) with n normalized over a group of channels of a sample, in
// three kernels (partial moments of each group, their merge, y), or in one (teams).
//
//   plan     moments and merge                     y                   when
//   teams    none: team_outputs, forward_teams.cu, computes both       groups are adjacent and up
//                                                                      to 64 KiB
//   parts    those of batch norm: a group is       part_outputs,       longer groups, with up to 64
//            adjacent in memory, as a channel is   forward_parts.cu    elements of a channel, or
//            in batch norm                                             with no vectors of planes
//   pixels   as parts, of the groups of a pixel:   part_outputs        channels_last: few pixels,
//            forward_pixels.cu                                         many channels in a group
//   planes   as parts                              plane_outputs,      channels are planes of
//                                                  forward_planes.cu   adjacent elements
//   rows     row_moments, merge_group,             row_outputs,        channels_last: adjacent
//            forward_rows.cu                       forward_rows.cu     channels
//
// planes.cuh and rows.cuh assign elements to threads, factors.cuh computes n. Gradients:
// backward.cu.

#include "launch.cuh"
#include "ops/batch_norm/forward.cuh"

namespace torchkiln::cuda {
Status group_norm(const GroupNorm& p, Allocate allocate, CUstream_st* stream) {
  const GroupNormPlan plan = choose(p, current_device());
  if (plan.teams) return group_norm_by_teams(p, *plan.teams, stream);
  if (plan.of_pixels) return group_norm_of_pixels(p, plan, allocate, stream);
  const Status status =
      plan.rows ? group_statistics_of_rows(p, plan.moments, allocate, stream)
                : moments_of(moments_of_groups(p, plan.moments), plan.moments, allocate, stream);
  if (!status.ok()) return status;
  if (plan.parts) return group_outputs_of_parts(p, *plan.parts, 1, stream);
  return plan.rows ? group_outputs_of_rows(p, *plan.rows, stream)
                   : group_outputs_of_planes(p, *plan.planes, stream);
}

}  // namespace torchkiln::cuda
