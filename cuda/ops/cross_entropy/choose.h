#pragma once

// Selects the kernels of cross_entropy: forward.cu and backward.cu have the tables. Includes no
// header of CUDA.

#include <optional>

#include "detail/rowwise/plans.h"
#include "torchkiln/kernels/cross_entropy.h"

namespace torchkiln::cuda {

using namespace device;
using namespace rowwise;

// Threads of a block that has one row. The block has no other work that hides the latency of its
// loads.
inline constexpr int kLossThreads = 256;
/// Vectors that a thread loads together. kSpreadItems: q is spread over the classes; kLongItems: a
/// row takes several steps; kShortItems: one step has the whole row.
inline constexpr int kSpreadItems = 2;
inline constexpr int kLongItems = 4;
inline constexpr int kShortItems = 8;
/// Threads of a block with several teams, one short row each.
inline constexpr int kSharedLossThreads = 128;

/// Maximum number of threads per block if one block or cluster processes all rows.
inline constexpr int kFewThreads = 512;
/// Maximum number of bytes per block for which one block or cluster processes all rows. It then
/// finishes before a second kernel, which adds the losses, would start (measured). kMostBytesOfRow
/// applies to one row per block, kMostBytesOfRows to several.
inline constexpr int64_t kMostBytesOfRow = 64 << 10;
inline constexpr int64_t kMostBytesOfRows = 32 << 10;

/// Threads of the block that adds the losses. From kFewestRowsOfCluster rows on, a cluster adds
/// them.
inline constexpr int kSumThreads = 1024;
inline constexpr TeamShape kSumCluster{kMaxTeamThreads, 31, 3, 1};
inline constexpr int64_t kFewestRowsOfCluster = 16384;

inline constexpr int kFlatLossThreads = 256;
/// Longest rows, in bytes, that a block copies to shared memory as one array.
inline constexpr int64_t kMostFlatBytes = 512;
/// Elements of a row per thread. With 32 elements of float64, a block would need more shared memory
/// than an SM of compute capability 7.5 has.
constexpr int flat_elements(size_t element) { return element == 8 ? 16 : 32; }

/// Threads of a block that writes gradients, and vectors that a thread loads together.
inline constexpr int kLossGradientThreads = 256;
inline constexpr int kLossGradientItems = 4;
/// Maximum number of vectors of a row per block: two steps of loads. Longer rows have several
/// blocks.
inline constexpr int64_t kMostGradientVectors =
    int64_t{kLossGradientThreads} * kLossGradientItems * 2;

inline constexpr int kFlatThreads = 256;
inline constexpr int kFlatItems = 4;
/// Rows of fewer than 32 vectors, so fewer than a warp has lanes, are written as one array, too.
inline constexpr int64_t kFewVectors = 32;

/// The way in which a team reads a row, with kItems vectors per thread and step.
///   steps  several steps: the loads of the next one are in flight while the current one is summed
///   once   one step has the whole row
///   inner  as once, for a row that begins anywhere: whole vectors, and one element per thread at
///          the edges. With partial vectors, `once` could need one more warp.
enum class RowPass { steps, once, inner };

/// Plan for rows that are copied to shared memory and read in vectors of `lanes` elements. `lanes`
/// divides the number of classes.
struct FlatRows {
  TeamShape team;
  int lanes;
  int shared_bytes;
};

/// The kernel of a forward: `flat`, or a team for each row.
struct CrossEntropyPlan {
  std::optional<FlatRows> flat;
  Alignment alignment;
  RowPass pass;
  TeamShape team;                // the threads of a row
  std::optional<TeamShape> all;  // one block or cluster with all rows: adds the losses
};

/// The work of a block: a part of a row of gradients, or several short rows.
struct GradientShape {
  int parts;  // blocks per row
  int vectors_per_part;
  TeamShape team;  // the threads of a row in a block
};

/// The kernel of a backward: all rows as one array in vectors of `flat_lanes`, or by rows.
struct CrossEntropyBackwardPlan {
  std::optional<int> flat_lanes;
  Alignment alignment;
  GradientShape shape;
  int64_t blocks;
};

/// The result that a kernel computes for a row.
///   target   the loss of a class
///   spread   the loss of a q that is not 0 outside of the target class
///   logprob  the logarithm of a class's probability, and the entropy
enum class RowForm { target, spread, logprob };

/// Whether q is not 0 outside of the target class.
inline bool is_spread(const ClassTarget& target) {
  return target.index == nullptr || target.label_smoothing != 0;
}
template <class Arguments>
RowForm form_of(const Arguments& p) {
  if (p.is_logprob) return RowForm::logprob;
  return is_spread(p.target) ? RowForm::spread : RowForm::target;
}

/// The alignment of logits and probabilities. `alignment`: that of all tensors with the logits'
/// dtype.
inline Alignment with_probabilities(Alignment alignment, const ClassTarget& target, Dtype dtype,
                                    int64_t classes) {
  const bool mixed = target.probabilities != nullptr && target.probabilities_dtype != dtype;
  const bool fits = rows_in_vectors(target.probabilities, vector_lanes(dtype),
                                    {classes, target.probabilities_row_stride});
  return mixed && alignment == Alignment::vector && !fits ? Alignment::scalar : alignment;
}

/// The rows of probabilities, null unless they have the logits' dtype.
inline TensorRows probability_rows(const ClassTarget& target, Dtype dtype) {
  return {target.probabilities_dtype == dtype ? target.probabilities : nullptr,
          target.probabilities_row_stride};
}

/// Vectors of a row. A row with an offset may have one more, because its first and last vectors are
/// partial.
inline int64_t vectors_of_row(Alignment alignment, Dtype dtype, int64_t classes) {
  if (alignment == Alignment::scalar) return classes;
  return ceil_div(classes, vector_lanes(dtype)) + (alignment == Alignment::vector ? 0 : 1);
}

/// The team of a row, for calls whose rows need several blocks or clusters.
inline TeamShape team_of_row(const CrossEntropy& p, int64_t vectors, const Device& device) {
  const int64_t threads = ceil_div(vectors, kShortItems);
  TeamShape team =
      make_team(threads, kLossThreads, threads <= kWarpLanes ? kSharedLossThreads : 0, 1);
  // Clusters of blocks share long rows if there are too few rows to occupy every SM.
  while (device.runs_90_code && team.threads == kLossThreads && team.blocks() < kMaxClusterBlocks &&
         p.rows * team.blocks() < 2 * device.multiprocessors && threads > 2 * team.size()) {
    ++team.log_blocks;
  }
  return team;
}

/// The teams of rows in one block or cluster, and the team `all` of all its threads.
struct FewRows {
  TeamShape team;
  TeamShape all;
};

/// Returns nullopt if there are too many rows.
inline std::optional<FewRows> choose_few_rows(const CrossEntropy& p, int64_t vectors,
                                              const Device& device) {
  const int64_t row_bytes = p.classes * static_cast<int64_t>(size_of(p.dtype));
  const int most_blocks = device.runs_90_code ? kMaxClusterBlocks : 1;
  const bool fits = p.rows <= most_blocks ? row_bytes <= kMostBytesOfRow
                                          : p.rows * row_bytes <= most_blocks * kMostBytesOfRows;
  if (!fits) return std::nullopt;
  FewRows plan{};
  const int64_t rows_of_block = ceil_div(p.rows, most_blocks);
  const int64_t threads = std::min(kFewThreads / rows_of_block, ceil_div(vectors, 4));
  int least_teams = 1;
  if (threads >= 2 * kWarpLanes) {
    const int64_t warps = threads / kWarpLanes;
    plan.team = make_team(warps * kWarpLanes, kFewThreads, kFewThreads, 1);
  } else {
    plan.team = make_team(ceil_div(vectors, kShortItems), kWarpLanes, kFewThreads, 1);
    // At least two warps per block: a team reduces through shared memory only in blocks of several
    // warps.
    least_teams = 2 * kWarpLanes / plan.team.threads;
  }
  const int64_t teams = ceil_div(rows_of_block, least_teams) * least_teams;
  if (teams > plan.team.per_block) return std::nullopt;
  plan.team.per_block = static_cast<int>(teams);
  const int64_t blocks = ceil_div(p.rows, teams);
  plan.all = {plan.team.block_threads(), 31, ceil_log2(blocks), 1};
  return plan;
}

/// Returns nullopt unless the rows are adjacent and short, and their vectors would be partial.
inline std::optional<FlatRows> choose_flat_rows(const CrossEntropy& p, Alignment alignment) {
  const size_t element = size_of(p.dtype);
  const bool is_short = p.classes * static_cast<int64_t>(element) <= kMostFlatBytes;
  if (is_spread(p.target) || p.is_logprob || p.row_stride != p.classes || !aligned(p.logits) ||
      alignment == Alignment::vector || !is_short) {
    return std::nullopt;
  }
  const int log_threads = ceil_log2(ceil_div(p.classes, flat_elements(element)));
  const TeamShape team{1 << log_threads, log_threads, 0, kFlatLossThreads >> log_threads};
  // At most half of the widest vector: alignment_of_rows() has found that the rows are not whole
  // vectors.
  int lanes = vector_lanes(p.dtype) / 2;
  while (p.classes % lanes != 0) lanes /= 2;
  return FlatRows{team, lanes,
                  team.per_block * static_cast<int>(p.classes * static_cast<int64_t>(element))};
}

inline Alignment alignment_of_rows(const CrossEntropy& p) {
  const TensorRows tensors[] = {{p.logits, p.row_stride}, probability_rows(p.target, p.dtype)};
  return with_probabilities(alignment_of(tensors, p.dtype, p.rows, p.classes), p.target, p.dtype,
                            p.classes);
}
/// The alignment of logits and of a gradient of a narrower type. A lane needs the same place in a
/// vector of logits and in a vector of as many gradients.
inline Alignment alignment_of_wide_rows(const CrossEntropyBackward& p) {
  const TensorRows logits[] = {{p.logits, p.row_stride}};
  const auto lanes = static_cast<uint64_t>(vector_lanes(p.dtype));
  const auto offset = [lanes](const void* data, Dtype dtype) {
    return reinterpret_cast<uintptr_t>(data) / size_of(dtype) % lanes;
  };
  const bool shares_offset =
      offset(p.logits, p.dtype) == offset(p.grad_logits, p.grad_logits_dtype) &&
      (p.rows == 1 || (p.row_stride - p.grad_logits_row_stride) % static_cast<int64_t>(lanes) == 0);
  return shares_offset ? alignment_of(logits, p.dtype, p.rows, p.classes) : Alignment::scalar;
}
inline Alignment alignment_of_rows(const CrossEntropyBackward& p) {
  if (p.grad_logits_dtype != p.dtype) return alignment_of_wide_rows(p);
  const TensorRows tensors[] = {{p.logits, p.row_stride},
                                {p.grad_logits, p.grad_logits_row_stride},
                                probability_rows(p.target, p.dtype)};
  return with_probabilities(alignment_of(tensors, p.dtype, p.rows, p.classes), p.target, p.dtype,
                            p.classes);
}

/// `adds`: whether the sum of the losses is wanted.
inline CrossEntropyPlan choose(const CrossEntropy& p, Alignment alignment, bool adds,
                               const Device& device) {
  CrossEntropyPlan plan{};
  plan.alignment = alignment;
  plan.pass = RowPass::steps;
  const int64_t vectors = vectors_of_row(plan.alignment, p.dtype, p.classes);
  const std::optional<FewRows> few = adds ? choose_few_rows(p, vectors, device) : std::nullopt;
  if (few) {
    plan.team = few->team;
    plan.all = few->all;
  } else {
    plan.flat = choose_flat_rows(p, plan.alignment);
    if (plan.flat) return plan;
    plan.team = team_of_row(p, vectors, device);
  }
  if (is_spread(p.target)) return plan;
  if (!few && plan.alignment == Alignment::shared_offset) {
    const int lanes = vector_lanes(p.dtype);
    const int64_t inner = inner_vectors(p.classes, lanes);
    const TeamShape team = team_of_row(p, inner, device);
    if (team.size() >= fewest_edge_threads(lanes) && inner <= kShortItems * team.size()) {
      plan.team = team;
      plan.pass = RowPass::inner;
      return plan;
    }
  }
  if (vectors <= int64_t{kShortItems} * plan.team.size()) plan.pass = RowPass::once;
  return plan;
}

/// The team that adds the losses.
inline TeamShape choose(const LossSum& p, const Device& device) {
  if (device.runs_90_code && p.rows >= kFewestRowsOfCluster) return kSumCluster;
  return make_team(std::max<int64_t>(ceil_div(p.rows, 4), kWarpLanes), kSumThreads, 0, 1);
}

/// Selects by shape and alignment only; the plan is the same on every GPU.
inline CrossEntropyBackwardPlan choose(const CrossEntropyBackward& p, Alignment alignment) {
  CrossEntropyBackwardPlan plan{};
  plan.alignment = alignment;
  const int lanes = vector_lanes(p.dtype);
  const bool is_short = plan.alignment != Alignment::vector || p.classes < kFewVectors * lanes;
  if (!is_spread(p.target) && !p.is_logprob && p.row_stride == p.classes &&
      p.grad_logits_row_stride == p.classes && aligned(p.logits) && aligned(p.grad_logits) &&
      is_short) {
    plan.flat_lanes = p.classes < lanes ? 1 : lanes;
    plan.blocks = ceil_div(p.rows * p.classes, kFlatThreads * kFlatItems * *plan.flat_lanes);
    return plan;
  }
  const int64_t vectors = vectors_of_row(plan.alignment, p.dtype, p.classes);
  const int64_t parts = ceil_div(vectors, kMostGradientVectors);
  const int64_t length = ceil_div(ceil_div(vectors, parts), kWarpLanes) * kWarpLanes;
  const int64_t threads = ceil_div(vectors, kLossGradientItems);
  const TeamShape team =
      make_team(threads, kLossGradientThreads, threads <= kWarpLanes ? kLossGradientThreads : 0, 1);
  plan.shape = {static_cast<int>(parts), static_cast<int>(length), team};
  plan.blocks = ceil_div(p.rows, team.per_block) * parts;
  return plan;
}

}  // namespace torchkiln::cuda
