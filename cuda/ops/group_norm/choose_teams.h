#pragma once

// Plans for groups that fit in the registers of a team of threads, and for sums over samples.
// Includes no header of CUDA.

#include "detail/rowwise/plans.h"
#include "torchkiln/kernels/group_norm.h"

namespace torchkiln::cuda {

using namespace device;

/// A team holds a group: each element is read once.
struct GroupTeamPlan {
  rowwise::TeamShape team;
  bool in_vectors;
};

/// The plan of a kernel that sums over samples, for the gradients of weight and bias.
struct GroupSamplesPlan {
  int lanes;
  int rows;               // samples that a block reads at a time, a warp each
  int64_t span;           // elements that have their own tiles: a sample or a group
  int64_t spans;          // per sample
  int64_t tiles_of_span;  // a warp's width of vectors each
  int64_t parts;          // parts of the samples

  int64_t tiles() const { return spans * tiles_of_span; }
};

struct GroupTeamsPlan {
  GroupTeamPlan input;
  GroupSamplesPlan parameters;
};

inline constexpr int kSampleThreads = 256;
/// Longest groups of teams, in bytes. Measured on an H100 in float32: 64 groups of 16 KiB take 20
/// us by teams and 49 us by planes; 8192 groups of 12.5 KiB take 92 us and 250 us.
inline constexpr int64_t kMostTeamBytes = 64 * 1024;
/// Sums over samples are used if a channel of a sample has at most kMostSampleElements elements, or
/// if there are at least kFewestSamples samples: then the sums take little memory compared to x.
inline constexpr int64_t kMostSampleElements = 64;
inline constexpr int64_t kFewestSamples = 16;

inline bool has_group_teams(const GroupLayout& layout, Dtype dtype) {
  return (!layout.channels_last || layout.inner == 1) && layout.all_groups() <= INT32_MAX &&
         layout.channels * layout.inner <= INT32_MAX &&
         layout.count() * static_cast<int64_t>(size_of(dtype)) <= kMostTeamBytes;
}

inline std::optional<GroupTeamPlan> plan_group_teams(const GroupLayout& layout, Dtype dtype,
                                                     std::initializer_list<const void*> tensors,
                                                     const Device& device) {
  using namespace rowwise;
  if (!has_group_teams(layout, dtype)) return std::nullopt;
  bool in_vectors = layout.count() % vector_lanes(dtype) == 0;
  for (const void* tensor : tensors) in_vectors = in_vectors && aligned(tensor);
  const int64_t items = ceil_div(layout.count(), in_vectors ? vector_lanes(dtype) : 1);
  const auto rows = make_row_plan(items, 1, /*streams=*/2, kRowThreads, device);
  if (!rows || rows->items != kFewItems) return std::nullopt;
  return GroupTeamPlan{rows->team, in_vectors};
}

inline std::optional<GroupTeamPlan> choose_teams(const GroupNorm& p, const Device& device) {
  return plan_group_teams(p.layout, p.dtype, {p.x, p.y, p.weight, p.bias}, device);
}

inline GroupSamplesPlan plan_samples(const GroupLayout& layout, int64_t span, int lanes, int rows,
                                     const Device& device) {
  constexpr int64_t kSamplesOfThread = 8;  // fewest samples per thread
  constexpr int kBlocks = 4;               // per multiprocessor
  GroupSamplesPlan plan{lanes, rows, span, layout.channels * layout.inner / span, 0, 0};
  plan.tiles_of_span = ceil_div(span, int64_t{kWarpLanes} * lanes);
  const int64_t most = std::max<int64_t>(1, layout.batch / (rows * kSamplesOfThread));
  const int64_t fills = ceil_div(int64_t{device.multiprocessors} * kBlocks, plan.tiles());
  plan.parts = std::clamp<int64_t>(fills, 1, std::min<int64_t>(most, 65535));
  return plan;
}

inline std::optional<GroupTeamsPlan> choose_teams(const GroupNormBackward& p,
                                                  const Device& device) {
  if (p.layout.inner > kMostSampleElements && p.layout.batch < kFewestSamples) return std::nullopt;
  const auto input =
      plan_group_teams(p.layout, p.dtype, {p.grad, p.x, p.grad_x, p.weight, p.bias}, device);
  if (!input) return std::nullopt;
  const int lanes = input->in_vectors ? vector_lanes(p.dtype) : 1;
  return GroupTeamsPlan{*input, plan_samples(p.layout, p.layout.channels * p.layout.inner, lanes,
                                             kSampleThreads / kWarpLanes, device)};
}

}  // namespace torchkiln::cuda
