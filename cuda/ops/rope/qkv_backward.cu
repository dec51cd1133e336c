// The gradients of packed queries, keys and values and of the weights of the norms. A second kernel
// adds the blocks' sums for the weights (qkv_weight_sums.cuh).
//
//   plan       team        reads              when
//   across     a token     twice              one norm over all heads: qkv_across_backward.cu
//   ring       two heads   a round ahead      vectors, at least two rounds of two blocks per SM,
//                          to shared memory   and shared memory for them
//   once       two heads   to registers       vectors, otherwise
//   elements   one head    to registers       heads that are not whole 16-byte vectors

#include "ops/rope/qkv_across.cuh"
#include "ops/rope/qkv_weight_sums.cuh"

namespace torchkiln::cuda {
namespace {

/// Adds the sums of those teams of the block that are `included`, in a fixed order, and writes the
/// totals to one row.
template <class C, int kLanes, int kItems>
__device__ __forceinline__ void write_sums(const QkvPlan& plan, bool included,
                                           const C (&team_a)[kItems][kLanes],
                                           const C (&team_b)[kItems][kLanes], C* row) {
  __shared__ C shared[kMostHeadElements];
  const uint32_t lane_in_warp = threadIdx.x % kWarpLanes;
  C sum_a[kItems][kLanes], sum_b[kItems][kLanes];
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      sum_a[k][i] = included ? team_a[k][i] : C(0);
      sum_b[k][i] = included ? team_b[k][i] : C(0);
    }
  }
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
  __syncthreads();
}

/// Computes the gradients; each team processes the heads of one token per round.
template <class T, int kLanes, int kItems, int kHeads, int kStages>
__global__ void __launch_bounds__(kQkvThreads, kStages > 1 ? kQkvBackwardBlocks : 1)
    qkv_norm_rope_gradients(const QkvBackwardPlan backward) {
  using C = Compute<T>;
  extern __shared__ __align__(kVectorBytes) char memory[];
  wait_for_previous_kernel();
  const QkvPlan& plan = backward.plan;
  const QkvNormRope& p = plan.p;
  const HeadGroup group(plan, kHeads);
  const bool is_value = group.kind == kValues;
  const bool has_norm = p.norm != QkvNorm::none && !is_value;
  const uint32_t lane = threadIdx.x & (plan.team - 1);
  const int64_t row_heads = p.heads + 2 * p.kv_heads;
  const T* const grads = static_cast<const T*>(backward.grad[group.kind]);
  const int64_t (&stride)[3] = backward.grad_stride[group.kind];
  const auto exists = [&](int k, int j) {
    return lane + k * plan.team < plan.pieces && group.first + j < group.heads;
  };
  HeadRing<T, kLanes, kVectorsOfGradient * kItems * kHeads, kStages, kQkvThreads> ring(memory);
  const auto request = [&](uint32_t index) {
    const TokenAt token(plan, index);
    const T* const from = static_cast<const T*>(p.qkv) + token.batch * p.qkv_stride[0] +
                          token.token * p.qkv_stride[1] + group.packed * p.head_dim;
    const T* const grad_from =
        grads + token.batch * stride[0] + token.token * stride[1] + group.first * stride[2];
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      const Piece piece(plan, lane + k * plan.team, kLanes);
#pragma unroll
      for (int j = 0; j < kHeads; ++j) {
        if (!token.exists || !exists(k, j)) continue;
        const int at = kVectorsOfGradient * (k * kHeads + j);
        if (grads != nullptr) {
          ring.request(at, grad_from + j * stride[2] + piece.first);
          if (piece.has_second) ring.request(at + 1, grad_from + j * stride[2] + piece.second);
        }
        if (!has_norm) continue;
        ring.request(at + 2, from + j * p.head_dim + piece.first);
        if (piece.has_second) ring.request(at + 3, from + j * p.head_dim + piece.second);
      }
    }
    ring.commit();
  };
  // Zeros for vectors that are never requested: gradients that do not exist, missing second
  // vectors, and x if there is no norm.
  if (kLanes == 1 || grads == nullptr || !has_norm) ring.clear();
  const C inverse_size = C(1) / static_cast<C>(p.head_dim);
  C sum_a[kItems][kLanes] = {}, sum_b[kItems][kLanes] = {};
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
    T* const to =
        static_cast<T*>(backward.grad_qkv) + (index * row_heads + group.packed) * p.head_dim;
    const int64_t row = token.exists ? row_of(p.angles.rows, token.batch, token.token) : 0;
    const auto load_angles = [&](int k, const Piece& piece) {
      if (!piece.is_rotated || is_value || !token.exists || !exists(k, 0)) return;
      factors.template load_angles<T>(plan, piece, token.batch, row);
      negate(factors.sin);
    };
    // The gradient of the normalized and weighted head is the incoming gradient after the inverse
    // rotation. It is computed twice, because it does not fit in registers.
    const auto read = [&](int k, int j, const Piece& piece, C(&x_a)[kLanes], C(&x_b)[kLanes],
                          C(&grad_a)[kLanes], C(&grad_b)[kLanes]) {
      const int at = kVectorsOfGradient * (k * kHeads + j);
      widen(ring.read(at), grad_a);
      widen(ring.read(at + 1), grad_b);
      widen(ring.read(at + 2), x_a);
      widen(ring.read(at + 3), x_b);
      if (piece.is_rotated && !is_value)
        rotate(p.angles.interleaved, grad_a, grad_b, factors.cos, factors.sin);
    };
    C sums[2 * kHeads] = {};  // sums of squares, and of x times the gradient of the normalized head
    if constexpr (kItems == 1) load_angles(0, Piece(plan, lane, kLanes));
    ring.wait();
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      if (!token.exists || !exists(k, 0)) continue;
      const Piece piece(plan, lane + k * plan.team, kLanes);
      if constexpr (kItems > 1) {
        load_weights(k);
        load_angles(k, piece);
      }
#pragma unroll
      for (int j = 0; j < kHeads; ++j) {
        if (!has_norm || !exists(k, j)) continue;
        C x_a[kLanes], x_b[kLanes], grad_a[kLanes], grad_b[kLanes];
        read(k, j, piece, x_a, x_b, grad_a, grad_b);
#pragma unroll
        for (int i = 0; i < kLanes; ++i) {
          sums[j] += x_a[i] * x_a[i] + x_b[i] * x_b[i];
          sums[kHeads + j] += x_a[i] * (grad_a[i] * factors.weight_a[i]) +
                              x_b[i] * (grad_b[i] * factors.weight_b[i]);
        }
      }
    }
    C rstd[kHeads], pull[kHeads];
    if (p.norm != QkvNorm::none) reduce_warp(sums, Sum{}, static_cast<int>(plan.team));
#pragma unroll
    for (int j = 0; j < kHeads; ++j) {
      rstd[j] = has_norm ? rstd_of(sums[j], inverse_size, p) : C(1);
      pull[j] = sums[kHeads + j] * rstd[j] * rstd[j] * inverse_size;
    }
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      if (!token.exists || !exists(k, 0)) continue;
      const Piece piece(plan, lane + k * plan.team, kLanes);
      if constexpr (kItems > 1) {
        load_weights(k);
        load_angles(k, piece);
      }
#pragma unroll
      for (int j = 0; j < kHeads; ++j) {
        if (!exists(k, j)) continue;
        C x_a[kLanes], x_b[kLanes], grad_a[kLanes], grad_b[kLanes];
        read(k, j, piece, x_a, x_b, grad_a, grad_b);
#pragma unroll
        for (int i = 0; i < kLanes; ++i) {
          x_a[i] *= rstd[j];
          x_b[i] *= rstd[j];
          sum_a[k][i] += grad_a[i] * x_a[i];
          sum_b[k][i] += grad_b[i] * x_b[i];
          grad_a[i] = grad_a[i] * factors.weight_a[i] * rstd[j] - x_a[i] * pull[j];
          grad_b[i] = grad_b[i] * factors.weight_b[i] * rstd[j] - x_b[i] * pull[j];
        }
        store(to + j * p.head_dim + piece.first, grad_a);
        if (piece.has_second) store(to + j * p.head_dim + piece.second, grad_b);
      }
    }
    ring.advance();
  }
#pragma unroll 1
  for (int kind = kQueries; kind < kValues; ++kind) {
    if (backward.sums[kind] == nullptr) continue;
    write_sums(plan, group.kind == kind, sum_a, sum_b,
               static_cast<C*>(backward.sums[kind]) + blockIdx.x * p.head_dim);
  }
}

template <class T, int kLanes, int kItems, int kHeads, int kStages>
Status launch(const QkvPlan& plan, const QkvNormRopeBackward& arguments, Allocate allocate,
              CUstream_st* stream) {
  const WeightSums sums = make_weight_sums<T>(arguments, plan.blocks, plan.blocks, allocate);
  Grid grid{};
  grid.blocks = dim3(plan.blocks);
  grid.threads = dim3(kQkvThreads);
  grid.shared_bytes =
      HeadRing<T, kLanes, kVectorsOfGradient * kItems * kHeads, kStages, kQkvThreads>::kBytes;
  const Status status =
      launch_overlapped(qkv_norm_rope_gradients<T, kLanes, kItems, kHeads, kStages>, grid, stream,
                        make_backward_plan(plan, arguments, sums));
  return status.ok() ? finish_weight_sums<T>(sums, plan.p.weight_dtype, stream) : status;
}

}  // namespace

Status qkv_norm_rope_backward(const QkvNormRopeBackward& arguments, Allocate allocate,
                              CUstream_st* stream) {
  if (arguments.forward.norm == QkvNorm::all)
    return qkv_norm_across_rope_backward(arguments, allocate, stream);
  const std::optional<QkvChoice> choice = choose(arguments, current_device());
  if (!choice) return {kTooManyTeams};
  const QkvPlan& plan = choice->plan;
  return dispatch_floating(arguments.forward.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int kLanes = kVectorLanes<T>, kHeads = kBackwardHeads;
    if (choice->lanes == 1)
      return launch<T, 1, kHeadItems, 1, 1>(plan, arguments, allocate, stream);
    return choice->stages > 1
               ? launch<T, kLanes, 1, kHeads, kRingStages>(plan, arguments, allocate, stream)
               : launch<T, kLanes, 1, kHeads, 1>(plan, arguments, allocate, stream);
  });
}

}  // namespace torchkiln::cuda
