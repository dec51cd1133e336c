#pragma once

// Teams of threads and their heads, for all kernels of qkv_norm_rope.

#include "ops/rope/angles.cuh"
#include "ops/rope/head_ring.cuh"
#include "torchkiln/device/launch.cuh"
#include "torchkiln/device/warp.cuh"

namespace torchkiln::cuda {

/// The kinds of heads: queries, keys (1) and values.
constexpr int kQueries = 0;
constexpr int kValues = 2;

inline constexpr const char* kTooManyTeams = "a token has more than 2^31 teams";

/// The heads of the calling thread's team. All are of the same kind, so that a thread needs one
/// weight.
struct HeadGroup {
  uint32_t token;  // in the first round
  int kind = kQueries;
  int64_t first;       // index among the heads of this kind
  int64_t heads;       // all heads of this kind
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

/// A token, found by its index among the tokens of all batches.
struct TokenAt {
  bool exists;
  uint32_t batch;
  uint32_t token;

  __device__ __forceinline__ TokenAt(const QkvPlan& plan, uint32_t index)
      : exists(index < plan.all_tokens),
        batch(plan.tokens.quotient(index)),
        token(index - batch * plan.tokens.divisor()) {}
};

/// The offsets of a piece's two vectors in a head. With an odd number of elements the last piece
/// has only the first vector; `second` is then a valid offset, too.
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

/// Loads the factors weight + offset. They are 1 if there is no weight, and for values.
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

/// The factors that a thread needs for a piece.
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

  /// Loads the weights of a piece. `head`: the index of the head's first element in the weight.
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

}  // namespace torchkiln::cuda
