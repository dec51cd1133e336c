#pragma once

// Selects the kernels of qkv_norm_rope: qkv_forward.cu and qkv_backward.cu have the tables.
// Includes no header of CUDA.

#include <numeric>

#include "ops/rope/choose.h"

namespace torchkiln::cuda {

// A team is 2^n threads of a warp. In each round it processes `heads` adjacent heads of a token.
// Each thread holds one or more pieces of each head. A piece is two vectors of `lanes` elements.
// Together they hold `lanes` pairs or, where the head is not rotated, 2 * `lanes` adjacent
// elements. Adjacent teams have adjacent heads, so blocks that run at the same time access adjacent
// memory.
inline constexpr int kQkvThreads = 256;
/// Heads per team and round: kFewHeads for few tokens, else kForwardHeads or kBackwardHeads. With
/// one head per team there are more teams, and less code to load into the instruction caches.
inline constexpr int kFewHeads = 1;
inline constexpr int kForwardHeads = 4;
inline constexpr int kBackwardHeads = 2;
/// Pieces per thread and head, if heads are not read in vectors.
inline constexpr int kHeadItems = kMostHeadElements / 2 / kWarpLanes;
/// Vectors per piece: two of x; in backward, two of x and two of the gradient.
inline constexpr int kVectorsOfPiece = 2;
inline constexpr int kVectorsOfGradient = 4;

/// Blocks per SM of kernels that read a round ahead, in forward and backward, and the stages of
/// their ring.
inline constexpr int kQkvBlocks = 3;
inline constexpr int kQkvBackwardBlocks = 2;
inline constexpr int kRingStages = 2;

/// For one norm over all heads: pieces of a token per thread, and threads per SM.
inline constexpr int kAcrossPieces = 2;
inline constexpr int kAcrossBackwardPieces = 3;
inline constexpr int64_t kAcrossThreads = 2 * kQkvThreads;
/// Several blocks share a token if there are fewer than kFewAcrossTokens tokens, and each would
/// take at least kManyRounds rounds: about kAcrossBlocks blocks in all, with at least two rounds
/// each.
inline constexpr int64_t kFewAcrossTokens = 64;
inline constexpr int64_t kManyRounds = 8;
inline constexpr int64_t kAcrossBlocks = 1024;
/// Maximum number of bytes of weight sums that a block keeps in shared memory. Larger sums are in
/// global memory.
inline constexpr int64_t kMostSharedBytes = 48 * 1024;

/// Threads of a block that adds the rows of sums for the weights: as many along a column as it has
/// rows, so that few tokens of many heads take few blocks.
struct FinishThreads {
  int columns;
  int rows;
};
inline constexpr int kFinishThreads = 1024;
inline FinishThreads finish_threads(int64_t rows) {
  constexpr int kMostColumns = 256;
  FinishThreads threads{kMostColumns, 1};
  while (threads.rows < kWarpLanes && threads.rows < rows) threads.rows *= 2;
  threads.columns = std::min(kMostColumns, kFinishThreads / threads.rows);
  return threads;
}

struct QkvPlan {
  QkvNormRope p;
  Divisor groups;  // groups of heads: queries, then keys, then values
  Divisor tokens;  // per batch
  uint32_t all_groups;
  uint32_t query_groups;
  uint32_t key_groups;
  uint32_t all_tokens;
  uint32_t team;    // threads per team
  uint32_t teams;   // per block
  uint32_t pieces;  // per head
  uint32_t pair_pieces;
  bool factors_in_vectors;
  bool weights_in_vectors;
  uint32_t blocks;
  uint32_t rounds;
  uint32_t step;  // tokens from a team's round to its next round

  /// Blocks that would be needed to process all tokens in one round.
  int64_t blocks_of_one_round() const { return ceil_div(int64_t{all_tokens} * all_groups, teams); }
};

/// The plan of a kernel whose blocks process one token each, or a part of one.
struct QkvAcrossPlan {
  QkvPlan plan;
  Divisor pieces;       // per head
  uint32_t normalized;  // pieces of queries and keys, which come first
  uint32_t all;
  int64_t sizes[2];  // elements per norm
};

/// The launch of a kernel with teams. A team has `heads` heads, read in vectors of `lanes`
/// elements: to a ring of `stages` stages or, with one stage, to registers.
struct QkvChoice {
  int lanes;
  int heads;
  int stages;
  QkvPlan plan;
};

/// The launch of a kernel with one norm over all heads.
struct QkvAcrossChoice {
  int lanes;
  int threads;
  int64_t blocks;    // along x
  int64_t parts;     // blocks along y, which share the pieces of a token
  int shared_bytes;  // for the sums of a backward; 0 if they are not in shared memory
  QkvAcrossPlan plan;
};

/// Bytes of a ring in shared memory whose vectors have `bytes` bytes. With one stage it is in
/// registers.
constexpr int ring_bytes(int stages, int vectors, int threads, int bytes) {
  return stages == 1 ? 0 : stages * vectors * threads * bytes;
}

constexpr int compute_bytes(Dtype dtype) { return dtype == Dtype::float64 ? 8 : 4; }

inline bool pieces_in_vectors(const QkvNormRope& p, int64_t lanes) {
  constexpr int64_t kMostPieces = 32;
  const auto fits = [&](int kind) {
    const int64_t (&stride)[3] = p.out_stride[kind];
    return rows_in_vectors(p.out[kind], lanes, {stride[0], stride[1], stride[2]});
  };
  return in_steps_of(lanes, {p.angles.rotary / 2}) &&
         in_steps_of(2 * lanes, {p.head_dim - p.angles.rotary}) &&
         p.head_dim / (2 * lanes) <= kMostPieces &&
         rows_in_vectors(p.qkv, lanes,
                         {p.batch == 1 ? 0 : p.qkv_stride[0], p.tokens == 1 ? 0 : p.qkv_stride[1],
                          p.head_dim}) &&
         fits(0) && fits(1) && fits(2);
}

inline bool gradients_in_vectors(const QkvNormRopeBackward& arguments, int64_t lanes) {
  const QkvNormRope& p = arguments.forward;
  for (int kind = 0; kind < 3; ++kind) {
    const int64_t (&stride)[3] = arguments.grad_stride[kind];
    if (!rows_in_vectors(arguments.grad[kind], lanes, {stride[0], stride[1], stride[2]}))
      return false;
  }
  return rows_in_vectors(arguments.grad_qkv, lanes, {p.head_dim});
}

/// The plan of a launch; set_blocks() sets the blocks.
inline QkvPlan make_qkv_plan(const QkvNormRope& p, int lanes, int heads) {
  QkvPlan plan{};
  plan.p = p;
  plan.pieces = static_cast<uint32_t>(ceil_div(p.head_dim, 2 * lanes));
  plan.pair_pieces = static_cast<uint32_t>(p.angles.rotary / 2 / lanes);
  plan.team = 1;
  while (plan.team < plan.pieces && plan.team < kWarpLanes) plan.team *= 2;
  plan.teams = kQkvThreads / plan.team;
  plan.query_groups = static_cast<uint32_t>(ceil_div(p.heads, heads));
  plan.key_groups = static_cast<uint32_t>(ceil_div(p.kv_heads, heads));
  plan.all_groups = plan.query_groups + 2 * plan.key_groups;
  plan.groups = Divisor(plan.all_groups);
  plan.tokens = Divisor(static_cast<uint32_t>(p.tokens));
  plan.all_tokens = static_cast<uint32_t>(p.batch * p.tokens);
  plan.factors_in_vectors = lanes > 1 && are_factors_in_vectors(p.angles);
  plan.weights_in_vectors = lanes > 1 && aligned(p.weight[0]) && aligned(p.weight[1]);
  return plan;
}

/// Plans at most `most` blocks, all with the same number of rounds. It has at least the blocks of
/// one unit: the fewest blocks whose teams together process whole tokens. Returns false if a token
/// has more than 2^31 teams.
inline bool set_blocks(QkvPlan& plan, int64_t most) {
  most = std::min(most, kMaxGridX / plan.teams);
  // The blocks of a unit process whole tokens: a team has the same heads in every round.
  const uint32_t unit_tokens = plan.teams / std::gcd(plan.all_groups, plan.teams);
  const int64_t unit_blocks = int64_t{unit_tokens} * plan.all_groups / plan.teams;
  const int64_t all_units = ceil_div(plan.all_tokens, unit_tokens);
  const int64_t rounds = ceil_div(all_units, std::max<int64_t>(most / unit_blocks, 1));
  const int64_t units = ceil_div(all_units, rounds);
  const bool once = plan.blocks_of_one_round() <= most;
  if (!once && unit_blocks > kMaxGridX / plan.teams) return false;
  plan.rounds = once ? 1 : static_cast<uint32_t>(rounds);
  plan.blocks = static_cast<uint32_t>(once ? plan.blocks_of_one_round() : units * unit_blocks);
  plan.step = static_cast<uint32_t>(units * unit_tokens);
  return true;
}

/// The plan for no norm, or one norm per head. Returns nullopt if a token has more than 2^31 teams.
inline std::optional<QkvChoice> choose(const QkvNormRope& p, const Device& device) {
  const auto in_one_round = [&](int lanes, int heads) -> std::optional<QkvChoice> {
    QkvChoice choice{lanes, heads, 1, make_qkv_plan(p, lanes, heads)};
    if (!set_blocks(choice.plan, kMaxGridX)) return std::nullopt;
    return choice;
  };
  const int lanes = vector_lanes(p.dtype);
  if (!pieces_in_vectors(p, lanes)) return in_one_round(1, 1);
  if (make_qkv_plan(p, lanes, kFewHeads).blocks_of_one_round() <= device.multiprocessors)
    return in_one_round(lanes, kFewHeads);
  QkvChoice ring{lanes, kForwardHeads, kRingStages, make_qkv_plan(p, lanes, kForwardHeads)};
  const int64_t resident = int64_t{kQkvBlocks} * device.multiprocessors;
  // Two thirds of the blocks of one round give two rounds. More rounds take 5 to 10 % longer,
  // because blocks that run at the same time are then further apart in memory.
  if (!set_blocks(ring.plan, std::max(resident, ring.plan.blocks_of_one_round() * 2 / 3)))
    return std::nullopt;
  const int bytes =
      ring_bytes(kRingStages, kVectorsOfPiece * kForwardHeads, kQkvThreads, kVectorBytes);
  if (ring.plan.rounds > 1 && kQkvBlocks * bytes <= device.shared_bytes) return ring;
  return in_one_round(lanes, kForwardHeads);
}

inline std::optional<QkvChoice> choose(const QkvNormRopeBackward& arguments, const Device& device) {
  const QkvNormRope& p = arguments.forward;
  const int widest = vector_lanes(p.dtype);
  const bool in_vectors = pieces_in_vectors(p, widest) && gradients_in_vectors(arguments, widest);
  const int lanes = in_vectors ? widest : 1;
  const int heads = in_vectors ? kBackwardHeads : 1;
  QkvChoice choice{lanes, heads, 1, make_qkv_plan(p, lanes, heads)};
  if (!set_blocks(choice.plan, int64_t{kQkvBackwardBlocks} * device.multiprocessors))
    return std::nullopt;
  // The shared memory of a block has the ring and the sums for one weight.
  const int sums = static_cast<int>(kMostHeadElements) * compute_bytes(p.dtype);
  const int bytes = ring_bytes(kRingStages, kVectorsOfGradient * heads, kQkvThreads, kVectorBytes);
  if (in_vectors && choice.plan.rounds > 1 &&
      kQkvBackwardBlocks * (bytes + sums) <= device.shared_bytes) {
    choice.stages = kRingStages;
  }
  return choice;
}

/// Threads per block, in whole warps, for about `pieces` pieces of a token per thread.
inline int across_threads(const QkvAcrossPlan& across, int pieces) {
  const auto rounds = [&](int64_t threads) { return ceil_div(across.all, threads); };
  const int64_t least = std::max<int64_t>(ceil_div(across.all, pieces), 2 * kWarpLanes);
  const int64_t even = ceil_div(across.all, rounds(std::min<int64_t>(least, kQkvThreads)));
  return static_cast<int>(ceil_div(even, kWarpLanes)) * kWarpLanes;
}

/// The launch with one block per token, or several if there are few tokens.
inline QkvAcrossChoice make_across_choice(const QkvNormRope& p, int lanes, int pieces) {
  QkvAcrossPlan plan{};
  plan.plan = make_qkv_plan(p, lanes, 1);
  plan.pieces = Divisor(plan.plan.pieces);
  plan.normalized = static_cast<uint32_t>(p.heads + p.kv_heads) * plan.plan.pieces;
  plan.all = static_cast<uint32_t>(p.heads + 2 * p.kv_heads) * plan.plan.pieces;
  for (int kind = 0; kind < 2; ++kind) plan.sizes[kind] = p.norm_size(kind);
  const int threads = across_threads(plan, pieces);
  const int64_t tokens = plan.plan.all_tokens, rounds = ceil_div(plan.all, threads);
  const bool is_shared = tokens < kFewAcrossTokens && rounds >= kManyRounds;
  const int64_t parts = is_shared ? std::min(kAcrossBlocks / tokens, rounds / 2) : 1;
  return {lanes, threads, tokens, parts, 0, plan};
}

/// The plan for one norm over all heads.
inline QkvAcrossChoice choose_across(const QkvNormRope& p) {
  const int widest = vector_lanes(p.dtype);
  return make_across_choice(p, pieces_in_vectors(p, widest) ? widest : 1, kAcrossPieces);
}

inline QkvAcrossChoice choose_across(const QkvNormRopeBackward& arguments, const Device& device) {
  const QkvNormRope& p = arguments.forward;
  const int widest = vector_lanes(p.dtype);
  const bool in_vectors = pieces_in_vectors(p, widest) && gradients_in_vectors(arguments, widest);
  QkvAcrossChoice choice = make_across_choice(p, in_vectors ? widest : 1, kAcrossBackwardPieces);
  if (choice.parts == 1)
    choice.blocks =
        std::min(choice.blocks, kAcrossThreads / choice.threads * device.multiprocessors);
  const int64_t bytes = (p.norm_size(0) + p.norm_size(1)) * compute_bytes(p.dtype);
  const bool wants_sums =
      arguments.grad_weight[0] != nullptr || arguments.grad_weight[1] != nullptr;
  if (wants_sums && choice.parts == 1 && bytes <= kMostSharedBytes)
    choice.shared_bytes = static_cast<int>(bytes);
  return choice;
}

}  // namespace torchkiln::cuda
