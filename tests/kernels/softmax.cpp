#include "ops/softmax/choose.h"

#include "plans.h"

namespace torchkiln::plans {
namespace {

using namespace cuda;

Launch launch_of(const RegistersPlan& plan, int64_t rows, int streams) {
  const TeamShape& team = plan.rows.team;
  Launch launch{"registers", RegistersPlan::kWhy};
  launch.blocks_x = ceil_div(rows, team.per_block) << team.log_blocks;
  launch.threads = team.block_threads();
  launch.most_threads = kRowThreads;
  launch.per_multiprocessor = plan.rows.items * streams <= kManyItems ? 2 : 1;
  launch.cluster = team.blocks();
  launch.shared_bytes = static_cast<int>(sizeof(TeamStorage<double, 2>));
  return launch;
}

Launch launch_of(const PartsPlan& plan, int64_t, int) {
  Launch launch{"parts", PartsPlan::kWhy};
  launch.blocks_x = plan.parts.blocks();
  launch.threads = launch.most_threads = kPartThreads;
  launch.per_multiprocessor = kSoftmaxPartBlocks;
  return launch;
}

Launch launch_of(const StridedPlan& plan, int64_t, int) {
  Launch launch{"columns", StridedPlan::kWhy};
  launch.blocks_x = plan.blocks;
  launch.threads = kStridedColumns * plan.depth;
  launch.most_threads = kStridedColumns * kMaxStridedDepth;
  launch.shared_bytes = launch.most_threads * static_cast<int>(sizeof(double));
  return launch;
}

Launch launch_of(const TilePlan& plan, int64_t, int) {
  Launch launch{"tile", TilePlan::kWhy};
  launch.blocks_x = plan.blocks;
  launch.threads = plan.threads();
  launch.most_threads = kMaxTileThreads;
  launch.shared_bytes = plan.bytes + kTileStaticBytes;
  return launch;
}

Launch launch_of(const ShortPlan& plan, int64_t, int) {
  Launch launch{"short", ShortPlan::kWhy};
  launch.blocks_x = plan.blocks;
  launch.threads = launch.most_threads = kShortThreads;
  return launch;
}

template <class Problem>
void write(const Gpu& gpu, const Call& call, const char* op, const char* operands, bool masked,
           int streams) {
  Problem p{};
  p.dtype = call.dtype;
  p.scale = 1;
  p.outer = call.rows;
  p.length = call.columns;
  p.inner = p.stride = p.inner_stride = 1;
  p.outer_stride = call.columns;
  p.mask.causal = masked;
  std::visit(
      [&](const auto& plan) {
        plans::write(gpu, call, op, operands, launch_of(plan, call.rows, streams));
      },
      cuda::choose(p, call.alignment, gpu.device));
}

void write_softmax(const Gpu& gpu, int64_t rows, int64_t columns) {
  for (const Call& call : calls(rows, columns)) {
    for (const bool masked : {false, true}) {
      const char* const operands = masked ? "causal_softmax" : "softmax";
      write<Softmax>(gpu, call, "softmax forward", operands, masked, 1);
      write<SoftmaxBackward>(gpu, call, "softmax backward", operands, masked, 2);
    }
  }
  // Softmax over the first of two dimensions.
  if (columns == 1) return;
  Softmax p{};
  p.scale = 1;
  const Call call{rows, columns, Dtype::bfloat16, Alignment::vector};
  p.dtype = call.dtype;
  p.outer = 1;
  p.length = rows;
  p.inner = p.stride = columns;
  p.inner_stride = 1;
  const SoftmaxPlan plan = cuda::choose(p, call.alignment, gpu.device);
  plans::write(gpu, call, "softmax forward", "softmax over dim 0",
               launch_of(std::get<StridedPlan>(plan), 0, 1));
  // Softmax over the last dimension of a transposed matrix, which is copied if its rows are long.
  const bool copies = columns * static_cast<int64_t>(size_of(p.dtype)) > most_strided_bytes(rows);
  p.outer = rows;
  p.length = columns;
  p.inner = p.inner_stride = 1;
  p.stride = copies ? 1 : rows;
  p.outer_stride = copies ? columns : 1;
  std::visit(
      [&](const auto& other) {
        plans::write(gpu, call, "softmax forward", "transposed softmax", launch_of(other, rows, 1));
      },
      cuda::choose(p, call.alignment, gpu.device));
}

const Family kSoftmax(write_softmax);

}  // namespace
}  // namespace torchkiln::plans
