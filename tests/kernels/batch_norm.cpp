#include "ops/batch_norm/choose.h"

#include "ops/batch_norm/choose_pool.h"
#include "plans.h"

namespace torchkiln::plans {
namespace {

using namespace cuda;

constexpr int64_t kChannels = 64;  // of calls with planes

Launch launch_of(const Gpu& gpu, const ChannelPass& pass, int blocks) {
  Launch launch;
  const bool folds = pass.plan.layout.inner > 1;
  launch.kernel = pass.whole      ? "whole"
                  : !pass.in_rows ? "planes"
                  : folds         ? "folded planes"
                                  : "rows";
  launch.why = pass.whole      ? "One kernel for both passes: a block has whole channels."
               : !pass.in_rows ? "A block has segments of planes of one channel."
               : folds ? "Planes of all channels as one row, whose sums are added at the end."
                       : "A thread keeps its columns; two kernels, and one between them.";
  launch.blocks_x = pass.plan.tiles;
  launch.blocks_y = pass.plan.parts;
  launch.threads = launch.most_threads = kChannelThreads;
  launch.shared_bytes = kRingBytes;
  launch.per_multiprocessor = resident_blocks(gpu, blocks, kRingBytes);
  return launch;
}

Launch resident(const ChannelPass& pass) {
  Launch launch{"resident", "One kernel for both passes: the rows that fit stay in shared memory."};
  launch.blocks_x = pass.plan.tiles;
  launch.blocks_y = pass.plan.parts;
  launch.threads = launch.most_threads = kChannelThreads;
  launch.shared_bytes = kResidentBytes;
  launch.per_multiprocessor = kResidentBlocks;
  launch.cooperative = true;
  return launch;
}

/// Writes the plans of a call. The two kernels of a forward in two passes have the same name.
void write_norm(const Gpu& gpu, const Call& call, const char* operands, const ChannelLayout& layout,
                bool adds) {
  const void* const x = call.alignment == Alignment::vector
                            ? address()
                            : static_cast<char*>(address()) + size_of(call.dtype);
  BatchNorm p{};
  p.x = x;
  p.y = address();
  if (adds) p.residual = address();
  p.dtype = call.dtype;
  p.activation = kActivation<Relu>;
  p.training = true;
  p.layout = layout;
  const BatchNormPlan plan = cuda::choose(p, gpu.device);
  const auto write = [&](const char* op, const Launch& launch) {
    plans::write(gpu, call, op, operands, launch);
  };
  if (plan.resident) write("batch norm forward", resident(*plan.resident));
  if (plan.moments) write("batch norm forward", launch_of(gpu, *plan.moments, kMomentBlocks));
  if (plan.outputs)
    write("batch norm forward",
          launch_of(gpu, *plan.outputs, plan.outputs->whole ? kMomentBlocks : kOutputBlocks));
  BatchNormBackward q{};
  q.grad = q.statistics = address();
  q.x = x;
  q.grad_x = q.grad_weight = q.grad_bias = address();
  q.dtype = call.dtype;
  q.activation = kActivation<Relu>;
  q.training = true;
  q.layout = layout;
  if (adds) q.grad_residual = address();
  const BatchNormBackwardPlan gradients = cuda::choose(q, gpu.device);
  write("batch norm backward",
        gradients.resident ? resident(*gradients.resident)
                           : launch_of(gpu, gradients.passes,
                                       backward_blocks(static_cast<int64_t>(size_of(call.dtype)),
                                                       gradients.passes.lanes)));
}

void write_batch_norm(const Gpu& gpu, int64_t rows, int64_t columns) {
  for (const Call& call : channel_calls(rows, columns)) {
    const ChannelLayout pixels{call.rows, call.columns, 1};
    write_norm(gpu, call, "adjacent channels", pixels, false);
    write_norm(gpu, call, "adjacent channels with a residual", pixels, true);
    if (call.columns > 1)
      write_norm(gpu, call, "planes of 64 channels", {call.rows, kChannels, call.columns}, false);
  }
}

/// Plans for `rows` images, at most 1024, of 112 x 112 pixels and `columns` channels.
void write_pool(const Gpu& gpu, int64_t rows, int64_t columns) {
  constexpr int64_t kSide = 112;
  const Call call{rows, ceil_div(columns, kChannelLanes) * kChannelLanes, Dtype::bfloat16,
                  Alignment::vector};
  BatchNormPool p{};
  const int64_t images = std::min<int64_t>(rows, 1024);
  p.windows = {images, kSide, kSide, kSide / 2, kSide / 2, {3, 3}, {2, 2}, {1, 1}};
  p.norm.dtype = call.dtype;
  p.norm.activation = kActivation<Relu>;
  p.norm.layout = {images * kSide * kSide, call.columns, 1};
  BatchNormPoolBackward q{};
  q.windows = p.windows;
  q.norm.dtype = call.dtype;
  q.norm.activation = p.norm.activation;
  q.norm.layout = p.norm.layout;
  const auto write = [&](const PoolPass& pass, int blocks) {
    Launch launch{"pool", "Threads walk over windows, or over the pixels of gradients."};
    launch.blocks_x = pass.plan.tiles;
    launch.blocks_y = pass.plan.parts;
    launch.threads = launch.most_threads = kChannelThreads;
    launch.per_multiprocessor = blocks;
    plans::write(gpu, call, "batch norm and max pool", "windows of 3 x 3", launch);
  };
  write(choose_outputs(p, gpu.device), pool_blocks(fixed_window(p.windows, p.norm.activation)));
  write(choose_sums(q, gpu.device), kPoolBackwardBlocks);
  write(choose_gradients(q, gpu.device), kPoolBackwardBlocks);
}

const Family kBatchNorm(write_batch_norm);
const Family kPool(write_pool);

}  // namespace
}  // namespace torchkiln::plans
