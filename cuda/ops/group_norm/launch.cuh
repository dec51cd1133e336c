#pragma once

// The launchers of forward_*.cu and backward_*.cu.

#include "choose.h"

namespace torchkiln::cuda {

/// Partial sums of each channel, of the compute type: of g and of g * (x - mean), with the rounded
/// mean. The index of the first sum of a part is
///   sample * samples + channel * channels + part * parts,
/// and the second sum is `second` elements after it.
struct GroupParts {
  const void* sums;
  int64_t count;  // parts per channel
  int64_t samples;
  int64_t channels;
  int64_t parts;
  int64_t second;
};

/// The arguments of a batch norm whose channels are the groups, which are adjacent in memory.
inline BatchNorm moments_of_groups(const GroupNorm& p, const ChannelPass& pass) {
  BatchNorm groups{};
  groups.x = p.x;
  groups.statistics = p.statistics;
  groups.dtype = p.dtype;
  groups.training = true;
  groups.eps = p.eps;
  groups.layout = pass.plan.layout;
  return groups;
}

/// Adjacent channels of few pixels: forward_pixels.cu.
Status group_norm_of_pixels(const GroupNorm& p, const GroupNormPlan& plan, Allocate allocate,
                            CUstream_st* stream);

/// Groups that fit in the registers of teams: forward_teams.cu, backward_teams.cu.
Status group_norm_by_teams(const GroupNorm& p, const GroupTeamPlan& plan, CUstream_st* stream);
Status group_norm_backward_by_teams(const GroupNormBackward& p, const GroupTeamsPlan& plan,
                                    Allocate allocate, CUstream_st* stream);

/// Groups that several blocks share: y from the statistics (forward_parts.cu), and all gradients
/// (backward_parts.cu). `pixels` consecutive samples share their statistics: they are the pixels of
/// one sample.
Status group_outputs_of_parts(const GroupNorm& p, const GroupPartPlan& plan, int64_t pixels,
                              CUstream_st* stream);
Status group_norm_backward_by_parts(const GroupNormBackward& p, const GroupPartsPlan& plan,
                                    Allocate allocate, CUstream_st* stream);

/// Computes y from the statistics, for planes of adjacent elements.
Status group_outputs_of_planes(const GroupNorm& p, const PlanePass& pass, CUstream_st* stream);

/// Computes the statistics, and y from them, for rows of adjacent channels.
Status group_statistics_of_rows(const GroupNorm& p, const ChannelPass& pass, Allocate allocate,
                                CUstream_st* stream);
Status group_outputs_of_rows(const GroupNorm& p, const ChannelPass& pass, CUstream_st* stream);

/// Partial sums of each channel.
Status group_sums_of_planes(const GroupNormBackward& p, const PlanePass& pass, Allocate allocate,
                            CUstream_st* stream, GroupParts& parts);
Status group_sums_of_rows(const GroupNormBackward& p, const ChannelPass& pass, Allocate allocate,
                          CUstream_st* stream, GroupParts& parts);

/// Computes grad_x from the coefficients slope and level, [2, batch * groups] of the compute type.
Status group_input_gradients_of_planes(const GroupNormBackward& p, const PlanePass& pass,
                                       const void* coefficients, CUstream_st* stream);
Status group_input_gradients_of_rows(const GroupNormBackward& p, const ChannelPass& pass,
                                     const void* coefficients, CUstream_st* stream);

}  // namespace torchkiln::cuda
