#include "ops/rope/choose.h"

#include "ops/rope/choose_qkv.h"
#include "plans.h"

namespace torchkiln::plans {
namespace {

using namespace cuda;

constexpr int64_t kHeadDim = 128;
constexpr int64_t kQueriesPerKey = 4;
constexpr int64_t kMostHeads = 1024;

Launch launch_of(const Gpu& gpu, const QkvChoice& choice, bool is_backward) {
  Launch launch;
  launch.kernel = choice.lanes == 1                           ? "elements"
                  : choice.stages > 1                         ? "ring"
                  : choice.heads == kFewHeads && !is_backward ? "few"
                                                              : "once";
  launch.why = choice.lanes == 1   ? "Heads that are not whole vectors."
               : choice.stages > 1 ? "Teams read the heads of their next token ahead."
               : choice.heads == kFewHeads && !is_backward
                   ? "A head per team: more teams than SMs are not there."
                   : "All tokens are in flight, or a GPU has no shared memory for the ring.";
  launch.blocks_x = choice.plan.blocks;
  launch.threads = launch.most_threads = kQkvThreads;
  const int vectors = (is_backward ? kVectorsOfGradient : kVectorsOfPiece) * choice.heads;
  launch.shared_bytes = ring_bytes(choice.stages, vectors, kQkvThreads, kVectorBytes);
  if (is_backward) launch.shared_bytes += static_cast<int>(kMostHeadElements) * 4;
  if (choice.stages > 1)
    launch.per_multiprocessor =
        resident_blocks(gpu, is_backward ? kQkvBackwardBlocks : kQkvBlocks, launch.shared_bytes);
  return launch;
}

Launch launch_of(const QkvAcrossChoice& choice, int per_multiprocessor) {
  Launch launch{"across", "One norm over all heads: a block reads its token twice."};
  launch.blocks_x = choice.blocks;
  launch.blocks_y = choice.parts;
  launch.threads = choice.threads;
  launch.most_threads = kQkvThreads;
  launch.shared_bytes = choice.shared_bytes;
  launch.per_multiprocessor = per_multiprocessor;
  return launch;
}

/// Queries of `columns` elements per token in heads of 128, and a quarter as many heads of keys.
void write_rope(const Gpu& gpu, int64_t rows, int64_t columns) {
  const int64_t heads = std::clamp<int64_t>(columns / kHeadDim, 1, kMostHeads);
  const int64_t keys = std::max<int64_t>(heads / kQueriesPerKey, 1);
  for (const Call& made : calls(rows, columns)) {
    if (made.alignment == Alignment::scalar || size_of(made.dtype) == 8) continue;
    const bool in_vectors = made.alignment == Alignment::vector;
    const Call& call = made;
    char* const x = static_cast<char*>(address()) + (in_vectors ? 0 : size_of(call.dtype));
    RopeAngles angles{};
    angles.cos = angles.sin = {address(), 0, kHeadDim / 2};
    angles.factor_step = 1;
    angles.factor_dtype = Dtype::float32;
    angles.rotary = kHeadDim;
    Rope p{};
    p.angles = angles;
    p.dtype = call.dtype;
    p.batch = 1;
    p.tokens = rows;
    p.head_dim = kHeadDim;
    const int64_t of_token = heads * kHeadDim;
    p.tensors[0] = {x, address(), heads, {0, of_token, kHeadDim}, {0, of_token, kHeadDim}};
    const RopePlan plan = *cuda::choose(p);
    Launch launch{in_vectors ? "vectors" : "elements",
                  in_vectors ? "A thread rotates the same pairs of four heads."
                             : "The same, for heads that are not whole vectors."};
    launch.blocks_x = plan.blocks;
    launch.threads = plan.threads;
    launch.most_threads = kMostRopeThreads;
    write(gpu, call, "rope", "rope", launch);

    QkvNormRopeBackward q{};
    q.forward.qkv = x;
    q.forward.angles = angles;
    q.forward.dtype = call.dtype;
    q.forward.norm = QkvNorm::head;
    q.forward.batch = 1;
    q.forward.tokens = rows;
    q.forward.heads = heads;
    q.forward.kv_heads = keys;
    q.forward.head_dim = kHeadDim;
    q.grad_qkv = q.grad_weight[0] = q.grad_weight[1] = address();
    for (int kind = 0; kind < 3; ++kind) {
      q.grad[kind] = q.forward.out[kind] = address();
      for (int64_t& stride : q.forward.out_stride[kind]) stride = kHeadDim;
      for (int64_t& stride : q.grad_stride[kind]) stride = kHeadDim;
    }
    write(gpu, call, "qkv_norm_rope forward", "norm of each head",
          launch_of(gpu, *cuda::choose(q.forward, gpu.device), false));
    write(gpu, call, "qkv_norm_rope backward", "norm of each head",
          launch_of(gpu, *cuda::choose(q, gpu.device), true));
    q.forward.norm = QkvNorm::all;
    write(gpu, call, "qkv_norm_rope forward", "norm over all heads",
          launch_of(choose_across(q.forward), 1));
    write(gpu, call, "qkv_norm_rope backward", "norm over all heads",
          launch_of(choose_across(q, gpu.device), 2));
  }
}

const Family kRope(write_rope);

}  // namespace
}  // namespace torchkiln::plans
