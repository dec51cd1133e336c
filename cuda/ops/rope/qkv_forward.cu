#include "ops/rope/qkv_across.cuh"

namespace torchkiln::cuda {
namespace {

template <class T, int kLanes, int kItems, int kHeads>
__global__ void __launch_bounds__(kQkvThreads) qkv_norm_rope_heads(const QkvPlan plan) {
  using C = Compute<T>;
  wait_for_previous_kernel();
  const QkvNormRope& p = plan.p;
  const HeadGroup group(plan, kHeads);
  const uint32_t lane = threadIdx.x & (plan.team - 1);
  const uint32_t index = group.token_block * plan.teams + threadIdx.x / plan.team;
  const bool is_token = index < plan.all_tokens;
  const uint32_t batch = plan.tokens.quotient(index);
  const uint32_t token = index - batch * plan.tokens.divisor();
  const T* const from = static_cast<const T*>(p.qkv) + batch * p.qkv_stride[0] +
                        token * p.qkv_stride[1] + group.packed * p.head_dim;
  const auto exists = [&](int k, int j) {
    return is_token && lane + k * plan.team < plan.pieces && group.first + j < group.heads;
  };

  Vec<T, kLanes> a[kHeads][kItems], b[kHeads][kItems];
#pragma unroll
  for (int j = 0; j < kHeads; ++j) {
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      fill(a[j][k], convert<T>(C(0)));
      fill(b[j][k], convert<T>(C(0)));
      if (!exists(k, j)) continue;
      const Piece piece(plan, lane + k * plan.team, kLanes);
      a[j][k] = load_constant<kLanes>(from + j * p.head_dim + piece.first);
      if (piece.has_second) b[j][k] = load_constant<kLanes>(from + j * p.head_dim + piece.second);
    }
  }
  const bool is_value = group.kind == kValues;
  const int64_t row = is_token ? row_of(p.angles.rows, batch, token) : 0;
  const int64_t place = is_token && group.kind != kQueries ? row_of(p.places, batch, token) : token;
  const int64_t (&stride)[3] = p.out_stride[group.kind];
  T* const to = static_cast<T*>(p.out[group.kind]) + batch * stride[0] + place * stride[1] +
                group.first * stride[2];
  const auto load = [&](int k, Factors<C, kLanes>& factors) {
    if (is_value || !exists(k, 0)) return;
    const Piece piece(plan, lane + k * plan.team, kLanes);
    if (piece.is_rotated) factors.template load_angles<T>(plan, piece, batch, row);
    factors.template load_weights<T>(plan, piece, group.kind);
  };
  // In flight during the reduction, if they fit in registers.
  Factors<C, kLanes> factors;
  if constexpr (kItems == 1) load(0, factors);
  C scale[kHeads];
#pragma unroll
  for (int j = 0; j < kHeads; ++j) scale[j] = C(1);
  if (p.norm != QkvNorm::none && !is_value) {
#pragma unroll
    for (int j = 0; j < kHeads; ++j) {
      scale[j] = C(0);
#pragma unroll
      for (int k = 0; k < kItems; ++k) {
        C wide_a[kLanes], wide_b[kLanes];
        widen(a[j][k], wide_a);
        widen(b[j][k], wide_b);
#pragma unroll
        for (int i = 0; i < kLanes; ++i) scale[j] += wide_a[i] * wide_a[i] + wide_b[i] * wide_b[i];
      }
    }
    reduce_warp(scale, Sum{}, static_cast<int>(plan.team));
#pragma unroll
    for (int j = 0; j < kHeads; ++j) scale[j] = rstd_of(scale[j], p.head_dim, p);
  }
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    if (!exists(k, 0) || place < 0) continue;
    const Piece piece(plan, lane + k * plan.team, kLanes);
    if constexpr (kItems > 1) load(k, factors);
#pragma unroll
    for (int j = 0; j < kHeads; ++j) {
      if (!exists(k, j)) continue;
      C wide_a[kLanes], wide_b[kLanes];
      widen(a[j][k], wide_a);
      widen(b[j][k], wide_b);
      if (!is_value) {
#pragma unroll
        for (int i = 0; i < kLanes; ++i) {
          wide_a[i] *= scale[j] * factors.weight_a[i];
          wide_b[i] *= scale[j] * factors.weight_b[i];
        }
      }
      if (piece.is_rotated && !is_value)
        rotate(p.angles.interleaved, wide_a, wide_b, factors.cos, factors.sin);
      store(to + j * stride[2] + piece.first, wide_a);
      if (piece.has_second) store(to + j * stride[2] + piece.second, wide_b);
    }
  }
}

template <class T, int kLanes, int kItems, int kHeads>
Status run(const QkvNormRope& p, CUstream_st* stream) {
  QkvPlan plan = make_qkv_plan<kLanes, kHeads>(p);
  plan.token_blocks = static_cast<uint32_t>(ceil_div(plan.all_tokens, plan.teams));
  const int64_t blocks = int64_t{plan.token_blocks} * plan.all_groups;
  if (blocks > kMaxGridX) return {"more than 2^31 - 1 blocks of heads"};
  Grid grid{};
  grid.blocks = dim3(static_cast<unsigned>(blocks));
  grid.threads = dim3(kQkvThreads);
  return launch_overlapped(qkv_norm_rope_heads<T, kLanes, kItems, kHeads>, grid, stream, plan);
}

}  // namespace

Status qkv_norm_rope(const QkvNormRope& arguments, CUstream_st* stream) {
  if (arguments.norm == QkvNorm::all) return qkv_norm_across_rope(arguments, stream);
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int kScalarItems = kMostHeadElements / 2 / kWarpLanes;
    return pieces_in_vectors(arguments, kVectorLanes<T>)
               ? run<T, kVectorLanes<T>, 1, 4>(arguments, stream)
               : run<T, 1, kScalarItems, 1>(arguments, stream);
  });
}

}  // namespace torchkiln::cuda
