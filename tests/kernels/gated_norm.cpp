#include "ops/gated_norm/choose.h"

#include "plans.h"

namespace torchkiln::plans {
namespace {

using namespace cuda;

void write_gated_norms(const Gpu& gpu, int64_t rows, int64_t columns) {
  for (const Call& call : calls(rows, columns)) {
    GatedNorm p{};
    p.x = p.gate = p.weight = address();
    p.y = address();
    p.dtype = p.weight_dtype = call.dtype;
    p.tokens = call.rows;
    p.groups = 1;
    p.columns = p.x_stride = p.gate_stride = call.columns;
    if (const auto plan = choose(p, call.alignment, gpu.device)) {
      const TeamShape& team = plan->rows.team;
      Launch launch{"one pass", GatedNormPlan::kWhy};
      launch.blocks_x = ceil_div(p.tokens, team.per_block) << team.log_blocks;
      launch.threads = team.block_threads();
      launch.most_threads = kRowThreads;
      launch.per_multiprocessor = plan->rows.items == kFewItems ? 2 : 1;
      launch.cluster = team.blocks();
      launch.shared_bytes = static_cast<int>(sizeof(TeamStorage<double, 1>));
      write(gpu, call, "gated_norm forward", "gated_norm", launch);
    } else {
      write(gpu, call, "gated_norm forward", "gated_norm", composed());
    }
    GatedNormBackward q{};
    q.grad = q.x = q.gate = q.weight = q.rstd = address();
    q.grad_x = q.grad_gate = q.grad_weight = address();
    q.dtype = q.weight_dtype = call.dtype;
    q.tokens = call.rows;
    q.groups = 1;
    q.columns = q.grad_stride = q.x_stride = q.gate_stride = call.columns;
    if (const auto plan = choose(q, call.alignment, gpu.device)) {
      Launch launch{"tokens in turn", GatedGradientPlan::kWhy};
      launch.blocks_x = plan->chunks * q.groups;
      launch.threads = plan->team.block_threads();
      launch.most_threads = kGradientThreads;
      launch.shared_bytes = plan->shared_bytes + (1 << 10);
      write(gpu, call, "gated_norm backward", "gated_norm", launch);
    } else {
      write(gpu, call, "gated_norm backward", "gated_norm", composed());
    }
  }
}

const Family kGatedNorm(write_gated_norms);

}  // namespace
}  // namespace torchkiln::plans
