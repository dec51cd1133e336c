#include "ops/cross_entropy/choose.h"

#include "plans.h"

namespace torchkiln::plans {
namespace {

using namespace cuda;

Launch launch_of(const CrossEntropyPlan& plan, int64_t rows) {
  Launch launch;
  const TeamShape& team = plan.flat ? plan.flat->team : plan.team;
  launch.blocks_x = ceil_div(rows, team.per_block) << team.log_blocks;
  launch.threads = team.block_threads();
  launch.most_threads = kLossThreads;
  launch.cluster = team.blocks();
  launch.shared_bytes = static_cast<int>(sizeof(TeamStorage<double, 4>));
  if (plan.flat) {
    launch.kernel = "flat";
    launch.why = "Short rows that are not whole vectors: a block copies them as one array.";
    launch.most_threads = kFlatLossThreads;
    launch.shared_bytes = plan.flat->shared_bytes + 2 * kFlatLossThreads * 8;
    return launch;
  }
  if (plan.all) {
    launch.kernel = "few rows";
    launch.why =
        "One block or cluster reads all rows faster than a kernel for the sum would start.";
    launch.blocks_x = plan.all->blocks();
    launch.threads = plan.all->block_threads();
    launch.most_threads = kFewThreads;
    launch.cluster = plan.all->blocks();
    launch.shared_bytes += static_cast<int>(sizeof(TeamStorage<double, 2>));
    return launch;
  }
  launch.per_multiprocessor = 4;
  launch.kernel = plan.pass == RowPass::inner  ? "inner"
                  : plan.pass == RowPass::once ? "once"
                                               : "steps";
  launch.why = plan.pass == RowPass::inner ? "As once, with single elements at the edges of a row."
               : plan.pass == RowPass::once
                   ? "One step of a team holds the row; a cluster is a team if rows are few."
                   : "The next step of a team is in flight while the current one is summed.";
  return launch;
}

Launch launch_of(const Gpu& gpu, const CrossEntropyBackwardPlan& plan, Dtype dtype) {
  Launch launch;
  launch.blocks_x = plan.blocks;
  launch.most_threads = kLossGradientThreads;
  if (plan.flat_lanes) {
    launch.kernel = "flat";
    launch.why = "Rows that are short or not whole vectors, written as one array.";
    launch.threads = kFlatThreads;
    const int row = size_of(dtype) == 8 ? 32 : 16;
    launch.shared_bytes = (kFlatThreads * kFlatItems + 1) * row;
    launch.per_multiprocessor =
        resident_blocks(gpu, size_of(dtype) == 2 ? 5 : 4, launch.shared_bytes);
    return launch;
  }
  launch.kernel = "rows";
  launch.why = "Blocks have a part of a row, or several rows.";
  launch.threads = plan.shape.team.block_threads();
  launch.per_multiprocessor = 4;
  return launch;
}

template <class Problem>
Problem problem(const Call& call, bool spread) {
  Problem p{};
  p.logits = address();
  p.dtype = call.dtype;
  p.target.index = static_cast<const int64_t*>(address());
  p.target.label_smoothing = spread ? 0.1 : 0;
  p.target.all_classes = call.columns;
  p.rows = call.rows;
  p.classes = p.row_stride = call.columns;
  return p;
}

void write_cross_entropy(const Gpu& gpu, int64_t rows, int64_t columns) {
  for (const Call& call : calls(rows, columns)) {
    for (const bool spread : {false, true}) {
      const auto p = problem<CrossEntropy>(call, spread);
      const char* const operands = spread ? "with label_smoothing" : "cross_entropy";
      write(gpu, call, "cross_entropy forward", operands,
            launch_of(cuda::choose(p, call.alignment, /*adds=*/true, gpu.device), call.rows));
      auto q = problem<CrossEntropyBackward>(call, spread);
      q.grad_logits = address();
      q.grad_logits_dtype = call.dtype;
      q.grad_logits_row_stride = call.columns;
      write(gpu, call, "cross_entropy backward", operands,
            launch_of(gpu, cuda::choose(q, call.alignment), call.dtype));
    }
  }
}

const Family kCrossEntropy(write_cross_entropy);

}  // namespace
}  // namespace torchkiln::plans
