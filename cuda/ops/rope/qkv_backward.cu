#include <algorithm>

#include "ops/rope/qkv_across.cuh"
#include "ops/rope/qkv_weight_sums.cuh"

namespace torchkiln::cuda {
namespace {

/// Adds the sums of the teams of a block, in a fixed order, and writes them to one row.
template <class C, int kLanes, int kItems>
__device__ __forceinline__ void write_sums(const QkvPlan& plan, C (&sum_a)[kItems][kLanes],
                                           C (&sum_b)[kItems][kLanes], C* row) {
  __shared__ C shared[kMostHeadElements];
  const uint32_t lane_in_warp = threadIdx.x % kWarpLanes;
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    for (uint32_t offset = plan.team; offset < kWarpLanes; offset *= 2) {
      exchange(sum_a[k], static_cast<int>(offset), Sum{});
      exchange(sum_b[k], static_cast<int>(offset), Sum{});
    }
  }
  for (uint32_t warp = 0; warp < kQkvThreads / kWarpLanes; ++warp) {
    if (threadIdx.x / kWarpLanes == warp && lane_in_warp < plan.team) {
#pragma unroll
      for (int k = 0; k < kItems; ++k) {
        if (lane_in_warp + k * plan.team >= plan.pieces) continue;
        const Piece piece(plan, lane_in_warp + k * plan.team, kLanes);
#pragma unroll
        for (int i = 0; i < kLanes; ++i) {
          C& a = shared[piece.first + i];
          C& b = shared[piece.second + i];
          a = warp == 0 ? sum_a[k][i] : a + sum_a[k][i];
          if (piece.has_second) b = warp == 0 ? sum_b[k][i] : b + sum_b[k][i];
        }
      }
    }
    __syncthreads();
  }
  for (int64_t i = threadIdx.x; i < plan.p.head_dim; i += kQkvThreads) row[i] = shared[i];
}

template <class T, int kLanes, int kItems, int kHeads>
__global__ void __launch_bounds__(kQkvThreads, kItems > 1 ? 1 : 2)
    qkv_norm_rope_gradients(const QkvBackwardPlan backward) {
  using C = Compute<T>;
  wait_for_previous_kernel();
  const QkvPlan& plan = backward.plan;
  const QkvNormRope& p = plan.p;
  const HeadGroup group(plan, kHeads);
  const bool is_value = group.kind == kValues;
  const uint32_t lane = threadIdx.x & (plan.team - 1);
  const int64_t row_heads = p.heads + 2 * p.kv_heads;
  const T* const grads = static_cast<const T*>(backward.grad[group.kind]);
  const int64_t (&stride)[3] = backward.grad_stride[group.kind];
  C sum_a[kItems][kLanes] = {}, sum_b[kItems][kLanes] = {};
  Factors<C, kLanes> factors;
  const auto load_weights = [&](int k) {
    if (lane + k * plan.team >= plan.pieces) return;
    const Piece piece(plan, lane + k * plan.team, kLanes);
    factors.template load_weights<T>(plan, piece, group.kind);
  };

  for (uint32_t block = group.token_block; block * plan.teams < plan.all_tokens;
       block += plan.token_blocks) {
    const uint32_t index = block * plan.teams + threadIdx.x / plan.team;
    const bool is_token = index < plan.all_tokens;
    const uint32_t batch = plan.tokens.quotient(index);
    const uint32_t token = index - batch * plan.tokens.divisor();
    const T* const from = static_cast<const T*>(p.qkv) + batch * p.qkv_stride[0] +
                          token * p.qkv_stride[1] + group.packed * p.head_dim;
    const T* const grad_from =
        grads + batch * stride[0] + token * stride[1] + group.first * stride[2];
    T* const to =
        static_cast<T*>(backward.grad_qkv) + (index * row_heads + group.packed) * p.head_dim;
    const auto exists = [&](int k, int j) {
      return is_token && lane + k * plan.team < plan.pieces && group.first + j < group.heads;
    };
    Vec<T, kLanes> x_a[kHeads][kItems], x_b[kHeads][kItems];
    Vec<T, kLanes> grad_a[kHeads][kItems], grad_b[kHeads][kItems];
#pragma unroll
    for (int j = 0; j < kHeads; ++j) {
#pragma unroll
      for (int k = 0; k < kItems; ++k) {
        const Piece piece(plan, lane + k * plan.team, kLanes);
        fill(x_a[j][k], convert<T>(C(0)));
        fill(x_b[j][k], convert<T>(C(0)));
        fill(grad_a[j][k], convert<T>(C(0)));
        fill(grad_b[j][k], convert<T>(C(0)));
        if (!exists(k, j)) continue;
        if (grads != nullptr) {
          grad_a[j][k] = load_constant<kLanes>(grad_from + j * stride[2] + piece.first);
          if (piece.has_second)
            grad_b[j][k] = load_constant<kLanes>(grad_from + j * stride[2] + piece.second);
        }
        if (is_value || p.norm == QkvNorm::none) continue;
        x_a[j][k] = load_constant<kLanes>(from + j * p.head_dim + piece.first);
        if (piece.has_second)
          x_b[j][k] = load_constant<kLanes>(from + j * p.head_dim + piece.second);
      }
    }
    if (is_value) {
#pragma unroll
      for (int j = 0; j < kHeads; ++j) {
#pragma unroll
        for (int k = 0; k < kItems; ++k) {
          if (!exists(k, j)) continue;
          const Piece piece(plan, lane + k * plan.team, kLanes);
          T* const head = to + j * p.head_dim;
          *reinterpret_cast<Vec<T, kLanes>*>(head + piece.first) = grad_a[j][k];
          if (piece.has_second)
            *reinterpret_cast<Vec<T, kLanes>*>(head + piece.second) = grad_b[j][k];
        }
      }
      continue;
    }

    // The gradient of the normalized and weighted head is the gradient, rotated back.
    const int64_t row = is_token ? row_of(p.angles.rows, batch, token) : 0;
    C wide_a[kHeads][kItems][kLanes], wide_b[kHeads][kItems][kLanes];
    C sums[2 * kHeads] = {};  // of squares, and of x times the gradient of the normalized head
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      const Piece piece(plan, lane + k * plan.team, kLanes);
      const bool rotates = piece.is_rotated && exists(k, 0);
      if (rotates) {
        factors.template load_angles<T>(plan, piece, batch, row);
        negate(factors.sin);
      }
#pragma unroll
      for (int j = 0; j < kHeads; ++j) {
        widen(grad_a[j][k], wide_a[j][k]);
        widen(grad_b[j][k], wide_b[j][k]);
        if (rotates) {
          rotate(p.angles.interleaved, wide_a[j][k], wide_b[j][k], factors.cos, factors.sin);
        }
      }
      load_weights(k);
#pragma unroll
      for (int j = 0; j < kHeads; ++j) {
        if (!exists(k, j)) continue;
        C values_a[kLanes], values_b[kLanes];
        widen(x_a[j][k], values_a);
        widen(x_b[j][k], values_b);
#pragma unroll
        for (int i = 0; i < kLanes; ++i) {
          sums[j] += values_a[i] * values_a[i] + values_b[i] * values_b[i];
          sums[kHeads + j] += values_a[i] * wide_a[j][k][i] * factors.weight_a[i] +
                              values_b[i] * wide_b[j][k][i] * factors.weight_b[i];
        }
      }
    }
    C rstd[kHeads], pull[kHeads];
    if (p.norm != QkvNorm::none) reduce_warp(sums, Sum{}, static_cast<int>(plan.team));
#pragma unroll
    for (int j = 0; j < kHeads; ++j) {
      rstd[j] = p.norm != QkvNorm::none ? rstd_of(sums[j], p.head_dim, p) : C(1);
      pull[j] = sums[kHeads + j] * rstd[j] * rstd[j] / static_cast<C>(p.head_dim);
    }
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      if (!exists(k, 0)) continue;
      const Piece piece(plan, lane + k * plan.team, kLanes);
      if constexpr (kItems > 1) load_weights(k);
#pragma unroll
      for (int j = 0; j < kHeads; ++j) {
        if (!exists(k, j)) continue;
        C values_a[kLanes], values_b[kLanes];
        widen(x_a[j][k], values_a);
        widen(x_b[j][k], values_b);
#pragma unroll
        for (int i = 0; i < kLanes; ++i) {
          C& a = wide_a[j][k][i];
          C& b = wide_b[j][k][i];
          sum_a[k][i] += a * (values_a[i] * rstd[j]);
          sum_b[k][i] += b * (values_b[i] * rstd[j]);
          a = rstd[j] * (a * factors.weight_a[i] - values_a[i] * pull[j]);
          b = rstd[j] * (b * factors.weight_b[i] - values_b[i] * pull[j]);
        }
        store(to + j * p.head_dim + piece.first, wide_a[j][k]);
        if (piece.has_second) store(to + j * p.head_dim + piece.second, wide_b[j][k]);
      }
    }
  }
  if (is_value || backward.sums[group.kind] == nullptr) return;
  const int64_t groups = group.kind == kQueries ? plan.query_groups : plan.key_groups;
  write_sums(plan, sum_a, sum_b,
             static_cast<C*>(backward.sums[group.kind]) +
                 (group.token_block * groups + group.of_kind) * p.head_dim);
}

template <class T, int kLanes, int kItems, int kHeads>
Status run(const QkvNormRopeBackward& arguments, Allocate allocate, CUstream_st* stream) {
  constexpr int64_t kBlocksPerMultiprocessor = 4;
  QkvPlan plan = make_qkv_plan<kLanes, kHeads>(arguments.forward);
  const int64_t groups = plan.all_groups;
  const int64_t wanted =
      ceil_div(kBlocksPerMultiprocessor * current_device().multiprocessors, groups);
  plan.token_blocks = static_cast<uint32_t>(
      std::min(wanted, ceil_div(plan.all_tokens, static_cast<int64_t>(plan.teams))));
  const WeightSums sums =
      make_weight_sums<T>(arguments, int64_t{plan.token_blocks} * plan.query_groups,
                          int64_t{plan.token_blocks} * plan.key_groups, allocate);
  Grid grid{};
  grid.blocks = dim3(static_cast<unsigned>(plan.token_blocks * groups));
  grid.threads = dim3(kQkvThreads);
  const Status status = launch_overlapped(qkv_norm_rope_gradients<T, kLanes, kItems, kHeads>, grid,
                                          stream, make_backward_plan(plan, arguments, sums));
  return status.ok() ? finish_weight_sums<T>(sums, plan.p.weight_dtype, stream) : status;
}

}  // namespace

Status qkv_norm_rope_backward(const QkvNormRopeBackward& arguments, Allocate allocate,
                              CUstream_st* stream) {
  if (arguments.forward.norm == QkvNorm::all)
    return qkv_norm_across_rope_backward(arguments, allocate, stream);
  return dispatch_floating(arguments.forward.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int kLanes = kVectorLanes<T>;
    constexpr int kScalarItems = kMostHeadElements / 2 / kWarpLanes;
    return pieces_in_vectors(arguments.forward, kLanes) && gradients_in_vectors(arguments, kLanes)
               ? run<T, kLanes, 1, 2>(arguments, allocate, stream)
               : run<T, 1, kScalarItems, 1>(arguments, allocate, stream);
  });
}

}  // namespace torchkiln::cuda
