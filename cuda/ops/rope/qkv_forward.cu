// Splits packed queries, keys and values, normalizes and rotates the heads, in one kernel.
//
//   plan       team        reads              when
//   across     a token     twice              one norm over all heads: qkv_across_forward.cu
//   few        one head    to registers       vectors, and no more blocks than SMs
//   ring       four heads  a round ahead      vectors, at least two rounds of three blocks per SM,
//                          to shared memory   and shared memory for them
//   once       four heads  to registers       vectors, otherwise
//   elements   one head    to registers       heads that are not whole 16-byte vectors
//
// qkv.cuh assigns elements to threads, head_ring.cuh reads them ahead. Gradients: qkv_backward.cu.

#include "ops/rope/qkv_across.cuh"

namespace torchkiln::cuda {
namespace {

/// Normalizes and rotates; each team processes the heads of one token per round.
template <class T, int kLanes, int kItems, int kHeads, int kStages>
__global__ void __launch_bounds__(kQkvThreads, kStages > 1 ? kQkvBlocks : 1)
    qkv_norm_rope_heads(const QkvPlan plan) {
  using C = Compute<T>;
  extern __shared__ __align__(kVectorBytes) char memory[];
  wait_for_previous_kernel();
  const QkvNormRope& p = plan.p;
  const HeadGroup group(plan, kHeads);
  const bool is_value = group.kind == kValues;
  const uint32_t lane = threadIdx.x & (plan.team - 1);
  const auto exists = [&](int k, int j) {
    return lane + k * plan.team < plan.pieces && group.first + j < group.heads;
  };
  HeadRing<T, kLanes, 2 * kItems * kHeads, kStages, kQkvThreads> ring(memory);
  const auto request = [&](uint32_t index) {
    const TokenAt token(plan, index);
    const T* const from = static_cast<const T*>(p.qkv) + token.batch * p.qkv_stride[0] +
                          token.token * p.qkv_stride[1] + group.packed * p.head_dim;
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      const Piece piece(plan, lane + k * plan.team, kLanes);
#pragma unroll
      for (int j = 0; j < kHeads; ++j) {
        if (!token.exists || !exists(k, j)) continue;
        const int at = 2 * (k * kHeads + j);
        ring.request(at, from + j * p.head_dim + piece.first);
        if (piece.has_second) ring.request(at + 1, from + j * p.head_dim + piece.second);
      }
    }
    ring.commit();
  };
  const auto read = [&](int k, int j, C(&a)[kLanes], C(&b)[kLanes]) {
    const Piece piece(plan, lane + k * plan.team, kLanes);
    const int at = 2 * (k * kHeads + j);
    widen(ring.read(at), a);
#pragma unroll
    for (int i = 0; i < kLanes; ++i) b[i] = C(0);
    if (piece.has_second) widen(ring.read(at + 1), b);
  };
  const C inverse_size = C(1) / static_cast<C>(p.head_dim);
  Factors<C, kLanes> factors;
  const auto load_weights = [&](int k) {
    if (!exists(k, 0)) return;
    factors.template load_weights<T>(plan, Piece(plan, lane + k * plan.team, kLanes), group.kind);
  };
  if constexpr (kItems == 1) load_weights(0);

  uint32_t ahead = group.token;
  for (int stage = 1; stage < kStages; ++stage, ahead += plan.step) request(ahead);
  uint32_t index = group.token;
  for (uint32_t round = 0; round < plan.rounds; ++round, index += plan.step, ahead += plan.step) {
    request(ahead);
    const TokenAt token(plan, index);
    const int64_t row = token.exists ? row_of(p.angles.rows, token.batch, token.token) : 0;
    const int64_t place = token.exists && group.kind != kQueries
                              ? row_of(p.places, token.batch, token.token)
                              : token.token;
    const auto load_angles = [&](int k) {
      const Piece piece(plan, lane + k * plan.team, kLanes);
      if (is_value || !piece.is_rotated || !token.exists || !exists(k, 0)) return;
      factors.template load_angles<T>(plan, piece, token.batch, row);
    };
    // The angles are in flight during the reduction, if they fit in registers.
    if constexpr (kItems == 1) load_angles(0);
    ring.wait();
    C scale[kHeads] = {};
    if (p.norm != QkvNorm::none) {
#pragma unroll
      for (int j = 0; j < kHeads; ++j) {
#pragma unroll
        for (int k = 0; k < kItems; ++k) {
          if (!token.exists || !exists(k, j)) continue;
          C a[kLanes], b[kLanes];
          read(k, j, a, b);
#pragma unroll
          for (int i = 0; i < kLanes; ++i) scale[j] += a[i] * a[i] + b[i] * b[i];
        }
      }
      reduce_warp(scale, Sum{}, static_cast<int>(plan.team));
    }
    const bool has_norm = p.norm != QkvNorm::none && !is_value;
#pragma unroll
    for (int j = 0; j < kHeads; ++j)
      scale[j] = has_norm ? rstd_of(scale[j], inverse_size, p) : C(1);
    const int64_t (&stride)[3] = p.out_stride[group.kind];
    T* const to = static_cast<T*>(p.out[group.kind]) + token.batch * stride[0] + place * stride[1] +
                  group.first * stride[2];
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      if (!token.exists || !exists(k, 0) || place < 0) continue;
      const Piece piece(plan, lane + k * plan.team, kLanes);
      if constexpr (kItems > 1) {
        load_weights(k);
        load_angles(k);
      }
#pragma unroll
      for (int j = 0; j < kHeads; ++j) {
        if (!exists(k, j)) continue;
        C a[kLanes], b[kLanes];
        read(k, j, a, b);
#pragma unroll
        for (int i = 0; i < kLanes; ++i) {
          a[i] *= scale[j] * factors.weight_a[i];
          b[i] *= scale[j] * factors.weight_b[i];
        }
        if (piece.is_rotated && !is_value)
          rotate(p.angles.interleaved, a, b, factors.cos, factors.sin);
        store(to + j * stride[2] + piece.first, a);
        if (piece.has_second) store(to + j * stride[2] + piece.second, b);
      }
    }
    ring.advance();
  }
}

template <class T, int kLanes, int kItems, int kHeads, int kStages>
Status launch(const QkvPlan& plan, CUstream_st* stream) {
  Grid grid{};
  grid.blocks = dim3(plan.blocks);
  grid.threads = dim3(kQkvThreads);
  grid.shared_bytes =
      HeadRing<T, kLanes, kVectorsOfPiece * kItems * kHeads, kStages, kQkvThreads>::kBytes;
  return launch_overlapped(qkv_norm_rope_heads<T, kLanes, kItems, kHeads, kStages>, grid, stream,
                           plan);
}

}  // namespace

Status qkv_norm_rope(const QkvNormRope& arguments, Allocate allocate, CUstream_st* stream) {
  if (arguments.norm == QkvNorm::all) return qkv_norm_across_rope(arguments, allocate, stream);
  const std::optional<QkvChoice> choice = choose(arguments, current_device());
  if (!choice) return {kTooManyTeams};
  const QkvPlan& plan = choice->plan;
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int kLanes = kVectorLanes<T>;
    if (choice->lanes == 1) return launch<T, 1, kHeadItems, 1, 1>(plan, stream);
    if (choice->heads == kFewHeads) return launch<T, kLanes, 1, kFewHeads, 1>(plan, stream);
    return choice->stages > 1 ? launch<T, kLanes, 1, kForwardHeads, kRingStages>(plan, stream)
                              : launch<T, kLanes, 1, kForwardHeads, 1>(plan, stream);
  });
}

}  // namespace torchkiln::cuda
