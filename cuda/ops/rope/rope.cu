// Rotates the heads of the queries and keys, both in one kernel. A thread rotates the same pairs of
// up to four heads of a token, whose factors it loads once.
//
//   plan       when
//   vectors    all parts of all heads are whole 16-byte vectors
//   elements   otherwise
//
// A block has one token if there are few, else as many as leave the fewest threads idle. angles.cuh
// has the rotation, qkv*.cu the kernels that also normalize, cache_mask.cu the mask of a cache.

#include "torchkiln/kernels/rope.h"

#include <algorithm>

#include "ops/rope/angles.cuh"
#include "torchkiln/device/alignment.h"
#include "torchkiln/device/fast_divide.cuh"
#include "torchkiln/device/launch.cuh"
#include "torchkiln/device/vec.cuh"

namespace torchkiln::cuda {
namespace {

using namespace device;

// A thread rotates kLanes pairs of up to kHeads heads of one token, so that the factors are loaded
// once for these heads and 2 * kHeads vectors are in flight.
constexpr int kHeads = 4;
constexpr int kMostThreads = 512;

struct Plan {
  Rope rope;
  Divisor vectors;  // per head: those of pairs, then those that are copied
  Divisor groups;   // of heads
  Divisor tokens;   // per batch
  uint32_t items;   // per block
  uint32_t block_tokens;
  uint32_t all_tokens;
  uint32_t pair_vectors;
  bool factors_in_vectors;
};

/// The addresses of the heads of one item.
template <class T>
struct Items {
  const T* from[kHeads];
  T* to[kHeads];
  bool exists[kHeads];

  __device__ __forceinline__ Items(const Plan& plan, uint32_t group, int64_t batch, int64_t token) {
    const RopeHeads& q = plan.rope.tensors[0];
    const RopeHeads& k = plan.rope.tensors[1];
#pragma unroll
    for (int j = 0; j < kHeads; ++j) {
      // Neighbouring groups have neighbouring heads.
      int64_t head = group + j * static_cast<int64_t>(plan.groups.divisor());
      const bool in_q = head < q.heads;
      const RopeHeads& heads = in_q ? q : k;
      if (!in_q) head -= q.heads;
      exists[j] = head < heads.heads;
      from[j] = static_cast<const T*>(heads.x) + batch * heads.x_stride[0] +
                token * heads.x_stride[1] + head * heads.x_stride[2];
      to[j] = static_cast<T*>(heads.y) + batch * heads.y_stride[0] + token * heads.y_stride[1] +
              head * heads.y_stride[2];
    }
  }
};

template <class T, int kLanes>
__device__ __forceinline__ void rotate_item(const Plan& plan, const Items<T>& heads,
                                            uint32_t vector, int64_t batch, int64_t token) {
  using C = Compute<T>;
  const Rope& p = plan.rope;
  const int64_t pair = int64_t{vector} * kLanes;
  const int64_t first = p.angles.interleaved ? 2 * pair : pair;
  const int64_t second = p.angles.interleaved ? first + kLanes : first + p.angles.rotary / 2;
  Vec<T, kLanes> a[kHeads], b[kHeads];
#pragma unroll
  for (int j = 0; j < kHeads; ++j) {
    if (!heads.exists[j]) continue;
    a[j] = load_constant<kLanes>(heads.from[j] + first);
    b[j] = load_constant<kLanes>(heads.from[j] + second);
  }
  C cos[kLanes], sin[kLanes];
  const int64_t row = row_of(p.angles.rows, batch, token);
  load_factors<T>(p.angles, p.angles.cos, batch, row, pair, plan.factors_in_vectors, cos);
  load_factors<T>(p.angles, p.angles.sin, batch, row, pair, plan.factors_in_vectors, sin);
  if (p.angles.inverse) negate(sin);
#pragma unroll
  for (int j = 0; j < kHeads; ++j) {
    if (!heads.exists[j]) continue;
    C wide_a[kLanes], wide_b[kLanes];
    widen(a[j], wide_a);
    widen(b[j], wide_b);
    rotate(p.angles.interleaved, wide_a, wide_b, cos, sin);
    store(heads.to[j] + first, wide_a);
    store(heads.to[j] + second, wide_b);
  }
}

template <class T, int kLanes>
__device__ __forceinline__ void copy_item(const Plan& plan, const Items<T>& heads,
                                          uint32_t vector) {
  const int64_t at = plan.rope.angles.rotary + int64_t{vector - plan.pair_vectors} * kLanes;
  Vec<T, kLanes> some[kHeads];
#pragma unroll
  for (int j = 0; j < kHeads; ++j)
    if (heads.exists[j]) some[j] = load_constant<kLanes>(heads.from[j] + at);
#pragma unroll
  for (int j = 0; j < kHeads; ++j)
    if (heads.exists[j]) *reinterpret_cast<Vec<T, kLanes>*>(heads.to[j] + at) = some[j];
}

template <class T, int kLanes>
__global__ void __launch_bounds__(kMostThreads) rope_heads(const Plan plan) {
  wait_for_previous_kernel();
  for (uint32_t item = threadIdx.x; item < plan.items; item += blockDim.x) {
    const uint32_t rest = plan.vectors.quotient(item);
    const uint32_t vector = item - rest * plan.vectors.divisor();
    const uint32_t in_block = plan.groups.quotient(rest);
    const uint32_t group = rest - in_block * plan.groups.divisor();
    const uint32_t index = blockIdx.x * plan.block_tokens + in_block;
    if (index >= plan.all_tokens) return;
    const uint32_t batch = plan.tokens.quotient(index);
    const uint32_t token = index - batch * plan.tokens.divisor();
    const Items<T> heads(plan, group, batch, token);
    if (vector < plan.pair_vectors) {
      rotate_item<T, kLanes>(plan, heads, vector, batch, token);
    } else {
      copy_item<T, kLanes>(plan, heads, vector);
    }
  }
}

/// Whether all parts of all heads are whole 16-byte vectors.
bool heads_in_vectors(const Rope& p, int64_t lanes) {
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

/// How many tokens a block gets: as many as leave the fewest threads of its last warp idle. Few
/// tokens are spread over many blocks.
uint32_t tokens_per_block(int64_t items_per_token, int64_t all_tokens) {
  constexpr int64_t kFewTokens = 2048;
  constexpr int64_t kLeastThreads = 128;
  if (all_tokens < kFewTokens) return 1;
  const auto threads = [](int64_t items) { return ceil_div(items, 32) * 32; };
  uint32_t best = 1;
  for (uint32_t tokens = 2; tokens * items_per_token <= kMostThreads; ++tokens) {
    const int64_t items = tokens * items_per_token, before = best * items_per_token;
    if (before < kLeastThreads || items * threads(before) > before * threads(items)) best = tokens;
  }
  return best;
}

template <class T, int kLanes>
Status run(const Rope& p, CUstream_st* stream) {
  const int64_t all_tokens = p.batch * p.tokens;
  const int64_t pair_vectors = p.angles.rotary / 2 / kLanes;
  const int64_t vectors = pair_vectors + (p.head_dim - p.angles.rotary) / kLanes;
  const int64_t groups = ceil_div(p.tensors[0].heads + p.tensors[1].heads, kHeads);
  if (vectors * groups >= int64_t{1} << 30) return {"more than 2^32 elements per token"};
  Plan plan{};
  plan.rope = p;
  plan.vectors = Divisor(static_cast<uint32_t>(vectors));
  plan.groups = Divisor(static_cast<uint32_t>(groups));
  plan.tokens = Divisor(static_cast<uint32_t>(p.tokens));
  plan.block_tokens = tokens_per_block(vectors * groups, all_tokens);
  plan.items = plan.block_tokens * static_cast<uint32_t>(vectors * groups);
  plan.all_tokens = static_cast<uint32_t>(all_tokens);
  plan.pair_vectors = static_cast<uint32_t>(pair_vectors);
  plan.factors_in_vectors = kLanes > 1 && are_factors_in_vectors(p.angles);
  const int64_t threads = std::min<int64_t>(kMostThreads, ceil_div(plan.items, 32) * 32);
  Grid grid{};
  grid.blocks = dim3(static_cast<unsigned>(ceil_div(all_tokens, plan.block_tokens)));
  grid.threads = dim3(static_cast<unsigned>(threads));
  return launch_overlapped(rope_heads<T, kLanes>, grid, stream, plan);
}

}  // namespace

Status rope(const Rope& arguments, CUstream_st* stream) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return heads_in_vectors(arguments, kVectorLanes<T>) ? run<T, kVectorLanes<T>>(arguments, stream)
                                                        : run<T, 1>(arguments, stream);
  });
}

}  // namespace torchkiln::cuda
