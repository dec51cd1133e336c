#pragma once

// Selects the kernel of a norm and distributes its rows, from the problem, the alignment of its
// tensors and the GPU. Includes no header of CUDA, so that tests/kernels run every choice without a
// GPU. docs/choosing.md is generated from it.

#include <variant>

#include "backward_plans.h"
#include "slab_plan.h"
#include "torchkiln/kernels/quantize.h"

namespace torchkiln::cuda {

using namespace device;
using namespace rowwise;

/// The plan for rows that fit in the registers of a team.
struct OnePassPlan {
  static constexpr const char* kWhy = "A team of threads holds the row: each element is read once.";
  RowPlan rows;
  Alignment alignment;
};

/// The plan for long rows, which are cut into slabs.
struct NormSlabsPlan : norm_slabs::SlabCall {
  static constexpr const char* kWhy =
      "Weight and bias are read once, not once per row; all blocks share long or unaligned rows.";
};

inline constexpr int kNormPartBlocks = 3;  // per SM
// Vectors per thread of a part: kFewPartVectors if the offsets of rows differ, else
// kManyPartVectors.
inline constexpr int kFewPartVectors = 4;
inline constexpr int kManyPartVectors = 8;

/// The plan for rows that do not fit in a team's registers: each block has a part of a row.
struct SplitNormPlan {
  static constexpr const char* kWhy = "No team and no slabs hold the row: blocks have a part each.";
  PartPlan parts;
  Alignment alignment;
};

using NormPlan = std::variant<OnePassPlan, NormSlabsPlan, SplitNormPlan>;

/// The alignment of the rows. choose() also tests the alignment of weight and bias.
inline Alignment alignment_of_rows(const Norm& p) {
  const TensorRows tensors[] = {
      {p.x, p.x_row_stride},
      {p.residual_dtype == p.dtype ? p.residual : nullptr, p.residual_row_stride},
      {p.sum, p.columns},
      {p.y, p.columns}};
  return alignment_of(tensors, p.dtype, p.rows, p.columns);
}

inline std::optional<NormSlabsPlan> plan_norm_slabs(const Norm& p, Alignment alignment,
                                                    const Device& device) {
  using namespace norm_slabs;
  const int64_t bytes = p.columns * static_cast<int64_t>(size_of(p.dtype));
  if (p.residual_dtype != p.dtype || bytes <= thresholds::most_bytes_without_slabs(p, alignment))
    return std::nullopt;
  const SlabRows rows{{p.x, p.residual, nullptr},
                      {p.x_row_stride, p.residual_row_stride, 0},
                      p.residual == nullptr ? 1 : 2,
                      p.rows,
                      p.columns,
                      p.dtype,
                      alignment,
                      thresholds::kRunRowsForward};
  const std::optional<SlabPlan> plan = plan_slabs(rows, true, device);
  if (!plan || p.rows < thresholds::kFewestRowsOfSlabTeam * plan->teams) return std::nullopt;
  return NormSlabsPlan{{rows, *plan, true}};
}

/// `alignment`: alignment_of_rows(p).
inline NormPlan choose(const Norm& p, Alignment alignment, const Device& device) {
  if (const auto slabs = plan_norm_slabs(p, alignment, device)) return *slabs;
  if (!aligned(p.weight) || !aligned(p.bias)) alignment = Alignment::scalar;
  alignment = without_short_edges(p.dtype, alignment, p.columns);
  if (p.residual_dtype != p.dtype && alignment == Alignment::vector &&
      !rows_in_vectors(p.residual, vector_lanes(p.dtype), {p.columns, p.residual_row_stride}))
    alignment = Alignment::scalar;
  // With eight vectors of two rows, or of float32 and its parameters, a thread spills. With four
  // vectors a long row needs a cluster, which also spreads few rows over more SMs.
  const bool is_few = p.rows < device.multiprocessors;
  const bool is_large =
      alignment != Alignment::scalar && (p.residual != nullptr || size_of(p.dtype) == 4 || is_few);
  if (const auto rows =
          plan_rows(p.dtype, alignment, p.columns, is_large ? 2 : 1, kRowThreads, device))
    return OnePassPlan{*rows, alignment};
  const int vectors = alignment == Alignment::scalar ? kFewPartVectors : kManyPartVectors;
  return SplitNormPlan{
      make_part_plan(p.rows, p.columns, vector_lanes(p.dtype), vectors, kNormPartBlocks, device),
      alignment};
}

// Threads of a block that also quantises, and blocks per SM: 80 registers per thread.
inline constexpr int kQuantizedThreads = 256;
inline constexpr int kQuantizedBlocks = 3;

/// The plan for rows that a team holds in registers and also quantises.
struct QuantizedPlan {
  static constexpr const char* kWhy =
      "A team holds the row, and quantises it: more vectors per thread, fewer instructions.";
  TeamShape team;
  // Whether every thread has all of its columns or none, all parameters are given, and there is
  // neither an offset nor a rounding before the weight: the kernel then takes fewer instructions.
  bool is_plain;
};

/// The plan that also quantises, for rows of whole vectors; nullopt if no team holds the row, so
/// that two kernels compute it. The rate of instructions limits this kernel: a warp takes about 300
/// per row for addresses, reduction and barrier. Therefore a thread holds kManyItems vectors, so
/// that few warps share a row.
inline std::optional<QuantizedPlan> plan_quantized(const Norm& p, const Device& device) {
  const NormPlan plan = choose(p, alignment_of_rows(p), device);
  const auto* const one_pass = std::get_if<OnePassPlan>(&plan);
  if (one_pass == nullptr || one_pass->alignment != Alignment::vector) return std::nullopt;
  constexpr int kColumns = kManyItems * kScaledElements;  // per group of threads
  const int64_t groups = ceil_div(p.columns, kColumns);
  const int64_t threads = groups * (kScaledElements / vector_lanes(p.dtype));
  const TeamShape team = make_row_team(threads, kQuantizedThreads, most_cluster_blocks(device));
  if (team.size() < threads) return std::nullopt;
  const bool has_parameters = p.weight != nullptr && (!p.centered || p.bias != nullptr);
  const bool has_options = p.weight_offset != 0 || p.rounds_normalized;
  return QuantizedPlan{team, has_parameters && !has_options && p.columns % kColumns == 0};
}

namespace norm_gradients {

/// The plan for long rows, which are cut into slabs.
struct GradientSlabsPlan : norm_slabs::SlabCall {
  static constexpr const char* kWhy =
      "Rows that begin anywhere, or that no block holds: all blocks share them, each element is "
      "read once.";
};

/// The plan for rows that no other plan takes.
struct SplitGradientsPlan {
  static constexpr const char* kWhy =
      "float64, long rows before 9.0, short rows whose offsets differ: the second read of a row "
      "hits L2.";
  GridPlan grid;
};

using GradientPlan =
    std::variant<FewRowsPlan, BulkPlan, GradientSlabsPlan, StreamPlan, SplitGradientsPlan>;

inline Alignment alignment_of_rows(const NormBackward& p) {
  const TensorRows tensors[] = {{p.grad, p.grad_row_stride},
                                {p.z, p.z_row_stride},
                                {p.grad_sum, p.grad_sum_row_stride},
                                {p.grad_x, p.columns}};
  const Alignment alignment = alignment_of(tensors, p.dtype, p.rows, p.columns);
  return alignment == Alignment::vector && !aligned(p.weight) ? alignment_with_offset(p.dtype)
                                                              : alignment;
}

inline std::optional<GradientSlabsPlan> plan_gradient_slabs(const NormBackward& p,
                                                            Alignment alignment,
                                                            const Device& device) {
  using namespace norm_slabs;
  const SlabRows rows{{p.grad, p.z, p.grad_sum},
                      {p.grad_row_stride, p.z_row_stride, p.grad_sum_row_stride},
                      p.grad_sum == nullptr ? 2 : 3,
                      p.rows,
                      p.columns,
                      p.dtype,
                      alignment,
                      thresholds::kRunRowsBackward};
  const bool exchanges = p.grad_x != nullptr;
  const std::optional<SlabPlan> plan = plan_slabs(rows, exchanges, device);
  if (!plan) return std::nullopt;
  return GradientSlabsPlan{{rows, *plan, exchanges}};
}

inline GradientPlan choose(const NormBackward& p, Alignment alignment, const Device& device) {
  const int64_t bytes = p.columns * static_cast<int64_t>(size_of(p.dtype));
  if (const auto few = plan_few_rows(p, alignment, device)) return *few;
  if (const auto bulk = plan_bulk(p, alignment, device)) return *bulk;
  if (bytes >= thresholds::fewest_bytes_of_slabs(p, alignment)) {
    if (const auto slabs = plan_gradient_slabs(p, alignment, device)) return *slabs;
  }
  if (const auto stream = plan_stream(p, alignment, device)) return *stream;
  if (bytes >= thresholds::kFewestSlabBytes) {
    if (const auto slabs = plan_gradient_slabs(p, alignment, device)) return *slabs;
  }
  return SplitGradientsPlan{
      make_grid_plan(p.rows, p.columns, vector_lanes(p.dtype), kSplitRows, device)};
}

}  // namespace norm_gradients
}  // namespace torchkiln::cuda
