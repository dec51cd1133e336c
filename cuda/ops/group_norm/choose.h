#pragma once

// Selects the kernels of group norm and how the elements are shared among their blocks: forward.cu
// and backward.cu have the tables. Includes no header of CUDA.

#include "choose_parts.h"
#include "ops/batch_norm/choose.h"
#include "torchkiln/kernels/group_norm.h"

namespace torchkiln::cuda {

/// Blocks per SM: kernels that write y, and kernels that read grad and x.
inline constexpr int kGroupOutputBlocks = 3;
inline constexpr int kGroupBackwardBlocks = 2;
/// Fewest rows per thread. With fewer rows, more partial sums would take longer than more blocks
/// save.
inline constexpr int64_t kFewestSampleRows = 8;
inline constexpr int kMergeThreads = 256;  // most threads of a block that merges a group's moments

/// The distribution of the segments of planes over threads. Depends only on the shape.
struct PlanePlan {
  static constexpr int kMaxItems = 8;

  int64_t planes;
  int64_t inner;     // elements of a plane
  int threads;       // threads per segment, a power of 2
  int items;         // vectors of a segment per thread
  int64_t segment;   // elements of a segment
  int64_t segments;  // segments per plane
  Divisor divisor;   // segments, if a plane has several

  TORCHKILN_HOST_DEVICE int64_t rows() const { return planes * segments; }
  TORCHKILN_HOST_DEVICE int rows_of_block() const { return kChannelThreads / threads; }
};

/// One kernel over planes.
struct PlanePass {
  int lanes;  // kChannelLanes, or 1 for single elements
  PlanePlan plan;
  int64_t blocks;  // all of them are resident
};

inline PlanePlan make_plane_plan(const GroupLayout& layout, int lanes) {
  PlanePlan plan{};
  plan.planes = layout.batch * layout.channels;
  plan.inner = layout.inner;
  const int64_t vectors = ceil_div(layout.inner, lanes);
  plan.threads = 1;
  while (plan.threads < kWarpLanes && plan.threads < vectors) plan.threads *= 2;
  plan.segments = ceil_div(vectors, int64_t{plan.threads} * PlanePlan::kMaxItems);
  const int64_t of_segment = ceil_div(vectors, plan.segments);
  plan.items = static_cast<int>(ceil_div(of_segment, plan.threads));
  plan.segment = of_segment * lanes;
  plan.divisor = Divisor(static_cast<uint32_t>(plan.segments));
  return plan;
}

/// `blocks`: blocks per SM.
inline PlanePass make_plane_pass(Dtype dtype, const GroupLayout& layout,
                                 std::initializer_list<const void*> tensors, int blocks,
                                 const Device& device) {
  const ChannelLayout planes{1, layout.batch * layout.channels, layout.inner};
  const int lanes = channel_lanes(dtype, planes, /*in_rows=*/false, tensors);
  const PlanePlan plan = make_plane_plan(layout, lanes);
  const int64_t most = ceil_div(plan.rows(), plan.rows_of_block());
  return {lanes, plan, std::min(most, int64_t{device.multiprocessors} * blocks)};
}

/// The plan for one sample of adjacent channels. It has as many parts as the blocks of all samples
/// need to fill the device.
inline ChannelPass make_sample_pass(Dtype dtype, const GroupLayout& layout,
                                    std::initializer_list<const void*> tensors, int blocks,
                                    const Device& device) {
  const ChannelLayout sample{layout.inner, layout.channels, 1};
  const int lanes = channel_lanes(dtype, sample, /*in_rows=*/true, tensors);
  ChannelPlan plan = make_channel_plan(sample, /*in_rows=*/true, lanes, blocks, device);
  const int64_t wave = int64_t{device.multiprocessors} * blocks;
  const int64_t most = ceil_div(layout.inner, plan.threads_y * kFewestSampleRows);
  const int64_t parts = reduce::parts_filling_waves(plan.tiles * layout.batch, most, wave);
  plan.parts = parts < 65535 ? parts : 65535;
  return {/*in_rows=*/true, lanes, plan};
}

/// A thread instead of a block adds the sums of a group, if there are at most kFewGroupSums of them
/// and at least kManyGroups groups.
inline constexpr int64_t kFewGroupSums = 8;
inline constexpr int64_t kManyGroups = 4096;
inline bool threads_have_groups(const GroupLayout& layout, int64_t parts) {
  return layout.channels_per_group() * parts <= kFewGroupSums && layout.all_groups() >= kManyGroups;
}

/// Blocks that share the channels of a group when they add its partial sums.
inline int64_t group_chunks(const GroupLayout& layout, const Device& device) {
  constexpr int64_t kFewestChannels = 1024;  // per block
  const int64_t fills = ceil_div(int64_t{device.multiprocessors} * 2, layout.all_groups());
  return std::min(fills, ceil_div(layout.channels_per_group(), kFewestChannels));
}

/// Threads of a block that merges `moments` moments.
inline int merge_threads(int64_t moments) {
  int threads = kWarpLanes;
  while (threads < kMergeThreads && threads * 4 < moments) threads *= 2;
  return threads;
}

// Adjacent channels of few pixels: a channel of a sample has fewer elements than its partial
// moments have bytes. If a group has many channels, its elements at one pixel, which are adjacent
// in memory, are treated as a group of their own. The moments of these groups are then merged over
// the pixels.
inline constexpr int64_t kMostPixels = 16;
inline constexpr int64_t kFewestPixelBytes = 4 * 1024;
/// Fewest elements for which this saves more time than the additional kernel takes.
inline constexpr int64_t kFewestOfPixels = int64_t{1} << 20;

/// The layout with a sample for each pixel.
inline GroupLayout pixels_of(const GroupLayout& layout) {
  return {layout.batch * layout.inner, layout.channels, layout.groups, 1, false};
}

inline bool has_groups_of_pixels(const GroupLayout& layout, Dtype dtype) {
  return layout.channels_last && layout.inner > 1 && layout.inner <= kMostPixels &&
         layout.channels_per_group() * static_cast<int64_t>(size_of(dtype)) >= kFewestPixelBytes &&
         layout.all_groups() * layout.count() >= kFewestOfPixels &&
         std::max(layout.channels, pixels_of(layout).all_groups()) <= INT32_MAX;
}

/// The kernels of a forward: `teams` alone, or `moments`, their merge, and one of `parts`, `planes`
/// and `rows` for y.
struct GroupNormPlan {
  std::optional<GroupTeamPlan> teams;
  bool of_pixels = false;  // `moments` and `parts` are those of pixels_of()
  ChannelPass moments;     // groups as channels of batch norm, except for rows
  std::optional<GroupPartPlan> parts;
  std::optional<PlanePass> planes;
  std::optional<ChannelPass> rows;
};

inline GroupNormPlan choose(const GroupNorm& p, const Device& device) {
  GroupNormPlan plan{};
  plan.teams = choose_teams(p, device);
  if (plan.teams) return plan;
  const auto tensors = {p.x, static_cast<const void*>(p.y)};
  GroupLayout layout = p.layout;
  plan.of_pixels = has_groups_of_pixels(layout, p.dtype);
  if (plan.of_pixels) layout = pixels_of(layout);
  plan.parts = plan_group_parts(layout, p.dtype, tensors, device);
  if (layout.channels_last && !plan.parts) {
    plan.moments = make_sample_pass(p.dtype, p.layout, {p.x}, kMomentBlocks, device);
    plan.rows = make_sample_pass(p.dtype, p.layout, tensors, kGroupOutputBlocks, device);
  } else {
    const ChannelLayout groups{1, layout.all_groups(), layout.count()};
    plan.moments = make_channel_pass(p.dtype, groups, {p.x}, kMomentBlocks, device);
    if (plan.parts) return plan;
    plan.planes = make_plane_pass(p.dtype, p.layout, tensors, kGroupOutputBlocks, device);
  }
  return plan;
}

/// The kernels of a backward, for sums and for grad_x: `teams`, `parts`, `planes` or `rows`.
struct GroupNormBackwardPlan {
  std::optional<GroupTeamsPlan> teams;
  std::optional<GroupPartsPlan> parts;
  std::optional<PlanePass> planes;
  std::optional<ChannelPass> rows;
};

inline GroupNormBackwardPlan choose(const GroupNormBackward& p, const Device& device) {
  GroupNormBackwardPlan plan{};
  plan.teams = choose_teams(p, device);
  if (plan.teams) return plan;
  plan.parts = choose_parts(p, device);
  if (plan.parts) return plan;
  const auto tensors = {p.grad, p.x, static_cast<const void*>(p.grad_x)};
  if (p.layout.channels_last) {
    plan.rows = make_sample_pass(p.dtype, p.layout, tensors, kGroupBackwardBlocks, device);
  } else {
    plan.planes = make_plane_pass(p.dtype, p.layout, tensors, kGroupBackwardBlocks, device);
  }
  return plan;
}

}  // namespace torchkiln::cuda
