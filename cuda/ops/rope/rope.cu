// Rotates the heads of the queries and keys, both in one kernel. A thread rotates the same pairs of
// up to four heads of a token, whose factors it loads once.
//
//   plan       when
//   vectors    all parts of all heads are whole 16-byte vectors
//   elements   otherwise
//
// If there are few tokens, a block has one token or a part of its heads. Otherwise it has as many
// tokens as leave the fewest threads idle. angles.cuh has the rotation, qkv*.cu the kernels that
// also normalize, cache_mask.cu the mask of a cache.

#include "ops/rope/angles.cuh"
#include "torchkiln/device/launch.cuh"

namespace torchkiln::cuda {
namespace {

constexpr int kHeads = kRopeHeads;

/// The addresses of the heads of one item.
template <class T>
struct Items {
  const T* from[kHeads];
  T* to[kHeads];
  bool exists[kHeads];

  __device__ __forceinline__ Items(const RopeWork& plan, uint32_t group, int64_t batch,
                                   int64_t token) {
    const RopeHeads& q = plan.rope.tensors[0];
    const RopeHeads& k = plan.rope.tensors[1];
#pragma unroll
    for (int j = 0; j < kHeads; ++j) {
      // Neighbouring threads have neighbouring groups, hence neighbouring heads.
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
__device__ __forceinline__ void rotate_item(const RopeWork& plan, const Items<T>& heads,
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
__device__ __forceinline__ void copy_item(const RopeWork& plan, const Items<T>& heads,
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
__global__ void __launch_bounds__(kMostRopeThreads) rope_heads(const RopeWork plan) {
  wait_for_previous_kernel();
  const uint32_t threads = gridDim.y * blockDim.x;
  for (uint32_t item = blockIdx.y * blockDim.x + threadIdx.x; item < plan.items; item += threads) {
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

template <class T, int kLanes>
Status launch(const RopePlan& plan, CUstream_st* stream) {
  const Grid grid{dim3(static_cast<unsigned>(plan.blocks), static_cast<unsigned>(plan.parts)),
                  dim3(static_cast<unsigned>(plan.threads))};
  return launch_overlapped(rope_heads<T, kLanes>, grid, stream, plan.work);
}

}  // namespace

Status rope(const Rope& arguments, CUstream_st* stream) {
  const std::optional<RopePlan> plan = choose(arguments);
  if (!plan) return {"2^30 or more groups of vectors per token"};
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return plan->lanes == 1 ? launch<T, 1>(*plan, stream)
                            : launch<T, kVectorLanes<T>>(*plan, stream);
  });
}

}  // namespace torchkiln::cuda
