#pragma once

// Distributes the heads of rope() over threads: rope.cu has the table. Includes no header of CUDA.

#include <algorithm>
#include <optional>

#include "torchkiln/device/alignment.h"
#include "torchkiln/device/fast_divide.cuh"
#include "torchkiln/kernels/rope.h"

namespace torchkiln::cuda {

using namespace device;

// Maximum number of heads per thread. A thread rotates `lanes` pairs of up to kRopeHeads heads of
// one token. So it loads the factors of these pairs once, and has 2 * kRopeHeads vectors in flight.
inline constexpr int kRopeHeads = 4;
inline constexpr int kMostRopeThreads = 512;
/// With fewer tokens, each token has a block of its own.
inline constexpr int64_t kFewRopeTokens = 2048;
/// Fewest threads of a block that has several tokens.
inline constexpr int64_t kLeastRopeThreads = 128;

/// The arguments of the kernel.
struct RopeWork {
  Rope rope;
  Divisor vectors;  // per head: vectors of pairs, then copied vectors
  Divisor groups;   // groups of heads per token
  Divisor tokens;   // tokens per batch
  uint32_t items;   // per block
  uint32_t block_tokens;
  uint32_t all_tokens;
  uint32_t pair_vectors;
  bool factors_in_vectors;
};

struct RopePlan {
  int lanes;
  int64_t blocks;  // along x
  int64_t parts;   // blocks along y, which share the items of a block along x
  int threads;
  RopeWork work;
};

/// Whether the factors of neighbouring pairs are whole 16-byte vectors.
inline bool are_factors_in_vectors(const RopeAngles& p) {
  const int64_t lanes = vector_lanes(p.factor_dtype);
  const auto fits = [&](const RopeFactors& factors) {
    return rows_in_vectors(factors.data, lanes, {factors.batch_stride, factors.row_stride});
  };
  return p.factor_step == 1 && fits(p.cos) && fits(p.sin);
}

/// Whether all parts of all heads are whole 16-byte vectors.
inline bool heads_in_vectors(const Rope& p, int64_t lanes) {
  if (!in_steps_of(lanes, {p.angles.rotary / 2, p.head_dim - p.angles.rotary})) return false;
  const auto fits = [&](const void* data, const int64_t (&stride)[3], int64_t heads) {
    return rows_in_vectors(
        data, lanes,
        {p.batch == 1 ? 0 : stride[0], p.tokens == 1 ? 0 : stride[1], heads == 1 ? 0 : stride[2]});
  };
  for (const RopeHeads& each : p.tensors) {
    if (each.heads == 0) continue;
    if (!fits(each.x, each.x_stride, each.heads) || !fits(each.y, each.y_stride, each.heads))
      return false;
  }
  return true;
}

/// Tokens per block: the number that leaves the fewest threads of the last warp idle.
inline uint32_t tokens_per_block(int64_t items_per_token, int64_t all_tokens) {
  if (all_tokens < kFewRopeTokens) return 1;
  const auto threads = [](int64_t items) { return ceil_div(items, kWarpLanes) * kWarpLanes; };
  uint32_t best = 1;
  for (uint32_t tokens = 2; tokens * items_per_token <= kMostRopeThreads; ++tokens) {
    const int64_t items = tokens * items_per_token, before = best * items_per_token;
    if (before < kLeastRopeThreads || items * threads(before) > before * threads(items))
      best = tokens;
  }
  return best;
}

/// Returns nullopt if a token has 2^30 or more items. An item is a vector of pairs in up to
/// kRopeHeads heads.
inline std::optional<RopePlan> choose(const Rope& p) {
  const int widest = vector_lanes(p.dtype);
  RopePlan plan{};
  plan.lanes = heads_in_vectors(p, widest) ? widest : 1;
  const int64_t all_tokens = p.batch * p.tokens;
  const int64_t pair_vectors = p.angles.rotary / 2 / plan.lanes;
  const int64_t vectors = pair_vectors + (p.head_dim - p.angles.rotary) / plan.lanes;
  const int64_t groups = ceil_div(p.tensors[0].heads + p.tensors[1].heads, kRopeHeads);
  if (vectors * groups >= int64_t{1} << 30) return std::nullopt;
  RopeWork& work = plan.work;
  work.rope = p;
  work.vectors = Divisor(static_cast<uint32_t>(vectors));
  work.groups = Divisor(static_cast<uint32_t>(groups));
  work.tokens = Divisor(static_cast<uint32_t>(p.tokens));
  work.block_tokens = tokens_per_block(vectors * groups, all_tokens);
  work.items = work.block_tokens * static_cast<uint32_t>(vectors * groups);
  work.all_tokens = static_cast<uint32_t>(all_tokens);
  work.pair_vectors = static_cast<uint32_t>(pair_vectors);
  work.factors_in_vectors = plan.lanes > 1 && are_factors_in_vectors(p.angles);
  plan.blocks = ceil_div(all_tokens, work.block_tokens);
  const int64_t threads = ceil_div(work.items, kWarpLanes) * kWarpLanes;
  plan.threads = static_cast<int>(std::min<int64_t>(kMostRopeThreads, threads));
  // Splits tokens among blocks if they are few: one block per token would leave most SMs idle.
  plan.parts = std::min(ceil_div(kFewRopeTokens, std::max<int64_t>(plan.blocks, 1)),
                        ceil_div(work.items, int64_t{plan.threads}));
  return plan;
}

}  // namespace torchkiln::cuda
