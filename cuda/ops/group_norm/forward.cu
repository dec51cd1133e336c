#include "launch.cuh"
#include "torchkiln/kernels/batch_norm.h"

namespace torchkiln::cuda {
namespace {

/// The statistics of planes: a group is adjacent in memory, as a channel of batch norm.
Status statistics_of_planes(const GroupNorm& p, Allocate allocate, CUstream_st* stream) {
  BatchNorm groups{};
  groups.x = p.x;
  groups.statistics = p.statistics;
  groups.dtype = p.dtype;
  groups.training = true;
  groups.eps = p.eps;
  groups.layout = {1, p.layout.all_groups(), p.layout.count()};
  return batch_norm_moments(groups, allocate, stream);
}

}  // namespace

Status group_norm(const GroupNorm& p, Allocate allocate, CUstream_st* stream) {
  if (const auto teams = choose_teams(p, current_device()))
    return group_norm_by_teams(p, *teams, stream);
  const Status status = p.layout.channels_last ? group_statistics_of_rows(p, allocate, stream)
                                               : statistics_of_planes(p, allocate, stream);
  if (!status.ok()) return status;
  return p.layout.channels_last ? group_outputs_of_rows(p, stream)
                                : group_outputs_of_planes(p, stream);
}

}  // namespace torchkiln::cuda
