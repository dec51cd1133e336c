#pragma once

// The parts that the kernels of qkv_norm_rope share: teams of threads and their heads.

#include <algorithm>
#include <numeric>

#include "ops/rope/angles.cuh"
#include "ops/rope/head_ring.cuh"
#include "torchkiln/device/fast_divide.cuh"
#include "torchkiln/device/launch.cuh"
#include "torchkiln/device/warp.cuh"

namespace torchkiln::cuda {

// A team of 2^n threads of a warp processes kHeads adjacent heads of a token per round. Each thread
// holds kItems pieces of a head; a piece is two vectors of kLanes elements, which are kLanes pairs,
// or adjacent elements that are not rotated. Adjacent teams have adjacent heads, so that the blocks
// that run at the same time read and write adjacent memory.
constexpr int kQkvThreads = 256;

/// Queries, keys, values.
constexpr int kQueries = 0;
constexpr int kValues = 2;

struct QkvPlan {
  QkvNormRope p;
  Divisor groups;  // of heads: those of the queries, the keys, the values
  Divisor tokens;  // per batch
  uint32_t all_groups;
  uint32_t query_groups;
  uint32_t key_groups;
  uint32_t all_tokens;
  uint32_t team;    // threads
  uint32_t teams;   // per block
  uint32_t pieces;  // per head
  uint32_t pair_pieces;
  bool factors_in_vectors;
  bool weights_in_vectors;
  uint32_t blocks;
  uint32_t rounds;
  uint32_t step;  // from a team's token to that of its next round

  /// Blocks that process all tokens in one round.
  int64_t blocks_of_one_round() const { return ceil_div(int64_t{all_tokens} * all_groups, teams); }
};

/// The heads of the calling thread's team, all of one kind: a thread needs one weight.
struct HeadGroup {
  uint32_t token;  // of the first round
  int kind = kQueries;
  int64_t first;       // head of this kind
  int64_t heads;       // of this kind
  int64_t packed = 0;  // the position of `first` in a packed row

  __device__ __forceinline__ HeadGroup(const QkvPlan& plan, int heads_per_group)
      : heads(plan.p.heads) {
    const uint32_t index = blockIdx.x * plan.teams + threadIdx.x / plan.team;
    token = plan.groups.quotient(index);
    uint32_t group = index - token * plan.groups.divisor();
    if (group >= plan.query_groups) {
      group -= plan.query_groups;
      packed = plan.p.heads;
      heads = plan.p.kv_heads;
      kind = 1;
      if (group >= plan.key_groups) {
        group -= plan.key_groups;
        packed += plan.p.kv_heads;
        kind = kValues;
      }
    }
    first = int64_t{group} * heads_per_group;
    packed += first;
  }
};

/// A token by its index among those of all batches.
struct TokenAt {
  bool exists;
  uint32_t batch;
  uint32_t token;

  __device__ __forceinline__ TokenAt(const QkvPlan& plan, uint32_t index)
      : exists(index < plan.all_tokens),
        batch(plan.tokens.quotient(index)),
        token(index - batch * plan.tokens.divisor()) {}
};

/// Where the two vectors of a piece begin in a head. The last piece of an odd number of elements
/// has one; `second` is then a valid address, too.
struct Piece {
  bool is_rotated;
  bool has_second;
  int64_t pair;
  int64_t first;
  int64_t second;

  __device__ __forceinline__ Piece(const QkvPlan& plan, uint32_t piece, int lanes) {
    const RopeAngles& angles = plan.p.angles;
    is_rotated = piece < plan.pair_pieces;
    pair = int64_t{piece} * lanes;
    first = is_rotated && !angles.interleaved ? pair : 2 * pair;
    second = is_rotated && !angles.interleaved ? pair + angles.rotary / 2 : first + lanes;
    has_second = lanes > 1 || second < plan.p.head_dim;
    if (!has_second) second = first;
  }
};

/// Sets the factors of a weight; ones without a weight, and for values.
template <class T, class C, int N>
__device__ __forceinline__ void load_weight(const QkvPlan& plan, int kind, int64_t at, C (&to)[N]) {
  const void* weight = kind == kValues ? nullptr : plan.p.weight[kind];
  if (weight == nullptr) {
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = C(1);
    return;
  }
  with_parameter_type<T>(plan.p.weight_dtype, [&](auto tag) {
    using S = typename decltype(tag)::type;
    load_run(static_cast<const S*>(weight) + at, 1, plan.weights_in_vectors, to);
  });
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] += static_cast<C>(plan.p.weight_offset);
}

/// What a thread needs for a piece, beside the heads.
template <class C, int kLanes>
struct Factors {
  C cos[kLanes];
  C sin[kLanes];
  C weight_a[kLanes];
  C weight_b[kLanes];

  template <class T>
  __device__ __forceinline__ void load_angles(const QkvPlan& plan, const Piece& piece,
                                              int64_t batch, int64_t row) {
    const RopeAngles& angles = plan.p.angles;
    load_factors<T>(angles, angles.cos, batch, row, piece.pair, plan.factors_in_vectors, cos);
    load_factors<T>(angles, angles.sin, batch, row, piece.pair, plan.factors_in_vectors, sin);
  }

  /// `head` is the element of the weight at which that of the head begins.
  template <class T>
  __device__ __forceinline__ void load_weights(const QkvPlan& plan, const Piece& piece, int kind,
                                               int64_t head = 0) {
    load_weight<T>(plan, kind, head + piece.first, weight_a);
    load_weight<T>(plan, kind, head + piece.second, weight_b);
  }
};

template <class C>
__device__ __forceinline__ C rstd_of(C sum_of_squares, C inverse_size, const QkvNormRope& p) {
  return rsqrt(sum_of_squares * inverse_size + static_cast<C>(p.eps));
}

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

/// The plan of a launch, whose blocks set_blocks() sets.
template <int kLanes, int kHeads>
QkvPlan make_qkv_plan(const QkvNormRope& p) {
  QkvPlan plan{};
  plan.p = p;
  plan.pieces = static_cast<uint32_t>(ceil_div(p.head_dim, 2 * kLanes));
  plan.pair_pieces = static_cast<uint32_t>(p.angles.rotary / 2 / kLanes);
  plan.team = 1;
  while (plan.team < plan.pieces && plan.team < kWarpLanes) plan.team *= 2;
  plan.teams = kQkvThreads / plan.team;
  plan.query_groups = static_cast<uint32_t>(ceil_div(p.heads, kHeads));
  plan.key_groups = static_cast<uint32_t>(ceil_div(p.kv_heads, kHeads));
  plan.all_groups = plan.query_groups + 2 * plan.key_groups;
  plan.groups = Divisor(plan.all_groups);
  plan.tokens = Divisor(static_cast<uint32_t>(p.tokens));
  plan.all_tokens = static_cast<uint32_t>(p.batch * p.tokens);
  plan.factors_in_vectors = kLanes > 1 && are_factors_in_vectors(p.angles);
  plan.weights_in_vectors = kLanes > 1 && aligned(p.weight[0]) && aligned(p.weight[1]);
  return plan;
}

/// Plans up to `most` blocks, but at least those whose teams together have whole tokens, with equal
/// numbers of rounds.
inline Status set_blocks(QkvPlan& plan, int64_t most) {
  most = std::min(most, kMaxGridX / plan.teams);
  // The blocks of a unit process whole tokens: a team has the same heads in every round.
  const uint32_t unit_tokens = plan.teams / std::gcd(plan.all_groups, plan.teams);
  const int64_t unit_blocks = int64_t{unit_tokens} * plan.all_groups / plan.teams;
  const int64_t all_units = ceil_div(plan.all_tokens, unit_tokens);
  const int64_t rounds = ceil_div(all_units, std::max<int64_t>(most / unit_blocks, 1));
  const int64_t units = ceil_div(all_units, rounds);
  const bool once = plan.blocks_of_one_round() <= most;
  if (!once && unit_blocks > kMaxGridX / plan.teams) return {"a token has more than 2^31 teams"};
  plan.rounds = once ? 1 : static_cast<uint32_t>(rounds);
  plan.blocks = static_cast<uint32_t>(once ? plan.blocks_of_one_round() : units * unit_blocks);
  plan.step = static_cast<uint32_t>(units * unit_tokens);
  return {};
}

}  // namespace torchkiln::cuda
