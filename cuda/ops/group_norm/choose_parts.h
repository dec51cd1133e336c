#pragma once

// Plans for groups with elements adjacent in memory that do not fit in the registers of a team:
// several blocks share a group. Includes no header of CUDA.

#include "choose_teams.h"
#include "detail/reduce/plans.h"

namespace torchkiln::cuda {

inline constexpr int kGroupPartThreads = 256;
inline constexpr int kGroupPartBlocks = 3;  // per SM
/// Fewest bytes per part. A block first adds the sums of its group, which must take less time than
/// reading its part.
inline constexpr int64_t kFewestPartBytes = 16 * 1024;

/// The parts of a group, one per block.
struct GroupPartPlan {
  int lanes;       // elements per vector
  int64_t parts;   // parts per group
  int64_t length;  // elements of a part
};

/// The plan for grad_x, and the plan for sums over the samples and over the parts of groups.
struct GroupPartsPlan {
  GroupPartPlan input;
  GroupSamplesPlan parameters;
};

/// Parts of all groups; nullopt if another plan must read them. Channels of more than
/// kMostSampleElements are left to the plan for planes, except where a group consists of whole
/// vectors and a channel does not.
inline std::optional<GroupPartPlan> plan_group_parts(const GroupLayout& layout, Dtype dtype,
                                                     std::initializer_list<const void*> tensors,
                                                     const Device& device) {
  if (layout.channels_last && layout.inner > 1) return std::nullopt;
  if (layout.channels * layout.inner > INT32_MAX) return std::nullopt;
  const int64_t count = layout.count();
  int lanes = vector_lanes(dtype);
  for (const void* tensor : tensors) lanes = std::min(lanes, widest_lanes(tensor, dtype, {count}));
  // Narrower vectors are allowed only in half precision, with 4 elements instead of 8.
  if (lanes < 4 && lanes < vector_lanes(dtype)) lanes = 1;
  const bool has_planes = lanes == 1 || layout.inner % 8 == 0;
  if (layout.inner > kMostSampleElements && has_planes) return std::nullopt;
  const int64_t wave = int64_t{device.multiprocessors} * kGroupPartBlocks;
  const int64_t most = ceil_div(count * static_cast<int64_t>(size_of(dtype)), kFewestPartBytes);
  const int64_t parts = reduce::parts_filling_waves(layout.all_groups(), most, wave);
  const int64_t step = int64_t{kWarpLanes} * lanes;
  const int64_t length = ceil_div(ceil_div(count, parts), step) * step;
  return GroupPartPlan{lanes, ceil_div(count, length), length};
}

inline std::optional<GroupPartsPlan> choose_parts(const GroupNormBackward& p,
                                                  const Device& device) {
  if (p.layout.inner > kMostSampleElements && p.layout.batch < kFewestSamples) return std::nullopt;
  const auto input = plan_group_parts(p.layout, p.dtype, {p.grad, p.x, p.grad_x}, device);
  if (!input) return std::nullopt;
  int rows = 1;  // samples per step, a warp each; further warps take other tiles
  while (rows < kSampleThreads / kWarpLanes && rows < p.layout.batch) rows *= 2;
  return GroupPartsPlan{*input,
                        plan_samples(p.layout, p.layout.count(), input->lanes, rows, device)};
}

}  // namespace torchkiln::cuda
