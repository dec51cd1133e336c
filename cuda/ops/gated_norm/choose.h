#pragma once

// The distribution of the groups of gated norms over blocks. Includes no header of CUDA:
// tests/kernels run it without a GPU.

#include "detail/rowwise/plans.h"
#include "torchkiln/kernels/gated_norm.h"

namespace torchkiln::cuda {

using namespace device;
using namespace rowwise;

inline constexpr const char* kNotHeld =
    "a group has more elements than the registers of a block hold";

/// The team that holds one group of a token in registers.
struct GatedNormPlan {
  static constexpr const char* kWhy = "A team holds a group of x and of the gate: one pass.";
  RowPlan rows;
  Alignment alignment;
};

/// The teams that process tokens of their group one by one.
struct GatedGradientPlan {
  static constexpr const char* kWhy = "A team keeps the sums of its columns over many tokens.";
  TeamShape team;
  int shared_bytes;
  int64_t chunks;  // blocks per group
  Alignment alignment;
};

/// The alignment of the groups of all tokens. Groups that are not whole vectors are read element by
/// element, because the weights of each group have another offset.
template <class Problem, int N>
Alignment alignment_of_groups(const Problem& p, const TensorRows (&tensors)[N]) {
  const Alignment alignment = alignment_of(tensors, p.dtype, p.tokens, p.columns);
  const bool in_vectors = alignment == Alignment::vector;
  return aligned(p.weight) && (in_vectors || p.groups == 1) ? alignment : Alignment::scalar;
}

inline Alignment alignment_of_groups(const GatedNorm& p) {
  const TensorRows tensors[] = {
      {p.x, p.x_stride}, {p.gate, p.gate_stride}, {p.y, p.groups * p.columns}};
  return alignment_of_groups(p, tensors);
}

inline Alignment alignment_of_groups(const GatedNormBackward& p) {
  const int64_t elements = p.groups * p.columns;
  const TensorRows tensors[] = {{p.grad, p.grad_stride},
                                {p.x, p.x_stride},
                                {p.gate, p.gate_stride},
                                {p.grad_x, elements},
                                {p.grad_gate, elements}};
  return alignment_of_groups(p, tensors);
}

/// Returns nullopt if no team holds a group.
inline std::optional<GatedNormPlan> choose(const GatedNorm& p, Alignment alignment,
                                           const Device& device) {
  alignment = without_short_edges(p.dtype, alignment, p.columns);
  // x and gate count as two rows. Blocks are small, because small blocks of a cluster are scheduled
  // sooner.
  const auto rows = plan_rows(p.dtype, alignment, p.columns, 2, kRowThreads / 2, device);
  if (!rows) return std::nullopt;
  return GatedNormPlan{*rows, alignment};
}

// Threads per SM. Each has 128 registers for 3 x 4 vectors and, in half precision, 32 sums.
inline constexpr int kGradientThreads = 512;
inline constexpr int kScalarItems = 8;  // per thread, if groups are not whole vectors

/// Returns nullopt if no block holds a group.
inline std::optional<GatedGradientPlan> choose(const GatedNormBackward& p, Alignment alignment,
                                               const Device& device) {
  constexpr int kSmallBlock = 128;  // threads of a block with several teams
  // Most tokens per team: the rounding errors of its sums grow with the number of tokens.
  constexpr int64_t kMaxTokens = 1024;
  const bool in_vectors = alignment == Alignment::vector;
  const int lanes = in_vectors ? vector_lanes(p.dtype) : 1;
  const int items = in_vectors ? kFewItems : kScalarItems;
  const int64_t threads = ceil_div(ceil_div(p.columns, lanes), items);
  const int shared_threads = threads <= kWarpLanes ? kSmallBlock : 0;
  GatedGradientPlan plan{make_team(threads, kGradientThreads, shared_threads, 1), 0, 0, alignment};
  const int sum_bytes = p.dtype == Dtype::float64 ? 8 : 4;
  plan.shared_bytes = lanes * items * sum_bytes * plan.team.block_threads();
  constexpr int kStorage = sizeof(TeamStorage<double, 1, kGradientThreads / kWarpLanes>);
  if (plan.team.size() < threads || plan.shared_bytes + kStorage > device.shared_bytes)
    return std::nullopt;
  const int64_t most = ceil_div(p.tokens, plan.team.per_block);
  const int64_t wave =
      int64_t{device.multiprocessors} * (kGradientThreads / plan.team.block_threads());
  plan.chunks = std::clamp(wave / p.groups, ceil_div(most, kMaxTokens), most);
  return plan;
}

}  // namespace torchkiln::cuda
