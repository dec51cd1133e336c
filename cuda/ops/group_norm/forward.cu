// y = activation(n * weight + bias) with n normalized over a group of channels of a sample, in
// three kernels: moments of parts of the groups, their merge, y.
//
//   plan     moments and merge                     y                   when
//   planes   those of batch norm: a group is       plane_outputs,      channels are planes of
//            adjacent in memory, as a channel is   forward_planes.cu   adjacent elements
//   rows     row_moments, merge_group,             row_outputs,        channels_last: adjacent
//            forward_rows.cu                       forward_rows.cu     channels
//
// planes.cuh and rows.cuh say which elements a thread has, factors.cuh computes n. Gradients:
// backward.cu.

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
  const Status status = p.layout.channels_last ? group_statistics_of_rows(p, allocate, stream)
                                               : statistics_of_planes(p, allocate, stream);
  if (!status.ok()) return status;
  return p.layout.channels_last ? group_outputs_of_rows(p, stream)
                                : group_outputs_of_planes(p, stream);
}

}  // namespace torchkiln::cuda
