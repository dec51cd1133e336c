#include "ops/norm/choose.h"

#include "plans.h"

namespace torchkiln::plans {
namespace {

using namespace cuda;
using namespace cuda::norm_gradients;

Launch launch_of(const OnePassPlan& plan, const Norm& p) {
  const TeamShape& team = plan.rows.team;
  Launch launch{"one pass", OnePassPlan::kWhy};
  launch.blocks_x = ceil_div(p.rows, team.per_block) << team.log_blocks;
  launch.threads = team.block_threads();
  launch.most_threads = kRowThreads;
  launch.per_multiprocessor = 2;
  launch.cluster = team.blocks();
  launch.shared_bytes = static_cast<int>(sizeof(TeamStorage<double, 4>));
  return launch;
}

Launch launch_of(const QuantizedPlan& plan, const Norm& p) {
  Launch launch = launch_of(OnePassPlan{{plan.team, kManyItems}, Alignment::vector}, p);
  launch.kernel = "fp8 pass";
  launch.why = QuantizedPlan::kWhy;
  launch.most_threads = kQuantizedThreads;
  launch.per_multiprocessor = kQuantizedBlocks;
  return launch;
}
Launch launch_of(const std::optional<QuantizedPlan>& plan, const Norm& p) {
  if (plan) return launch_of(*plan, p);
  return {"two kernels", "No team holds rows of whole vectors: y is written and read again."};
}

Launch launch_of(const norm_slabs::SlabCall& call, const char* why) {
  Launch launch{"slabs", why};
  launch.blocks_x = call.plan.blocks;
  launch.blocks_y = call.plan.teams;
  launch.threads = launch.most_threads = norm_slabs::kSlabBlockThreads;
  launch.per_multiprocessor = norm_slabs::kSlabBlocks;
  launch.shared_bytes = call.plan.shared_bytes + norm_slabs::kSlabReserved;
  launch.cooperative = call.is_cooperative();
  return launch;
}
Launch launch_of(const NormSlabsPlan& plan, const Norm&) {
  return launch_of(plan, NormSlabsPlan::kWhy);
}
Launch launch_of(const GradientSlabsPlan& plan, const NormBackward&) {
  return launch_of(plan, GradientSlabsPlan::kWhy);
}

Launch launch_of(const SplitNormPlan& plan, const Norm&) {
  Launch launch{"parts", SplitNormPlan::kWhy};
  launch.blocks_x = plan.parts.blocks();
  launch.threads = launch.most_threads = kPartThreads;
  launch.per_multiprocessor = kNormPartBlocks;
  return launch;
}

Launch launch_of(const FewRowsPlan& plan, const NormBackward&) {
  Launch launch{"few rows", FewRowsPlan::kWhy};
  launch.blocks_x = plan.row_blocks + plan.strips;
  launch.threads = plan.team.block_threads();
  launch.most_threads = kFewThreads;
  launch.per_multiprocessor = 2;
  return launch;
}

Launch launch_of(const BulkPlan& plan, const NormBackward&) {
  constexpr int kStatic = 2 << 10;  // barriers, sums, and 1 KiB of the system
  Launch launch{"bulk", BulkPlan::kWhy};
  launch.blocks_x = plan.blocks;
  launch.threads = plan.team.block_threads();
  launch.most_threads = kBulkThreads;
  launch.shared_bytes = plan.shared_bytes + kStatic;
  return launch;
}

Launch launch_of(const StreamPlan& plan, const NormBackward& p) {
  const size_t sums = sum_bytes(p) / sizeof(float);
  Launch launch{"stream", StreamPlan::kWhy};
  launch.blocks_x = plan.teams << plan.team.log_blocks;
  launch.threads = plan.team.block_threads();
  launch.most_threads = kThreads;
  launch.cluster = plan.team.blocks();
  launch.shared_bytes = plan.shared_bytes + static_cast<int>(sizeof(TeamStorage<float, 2>) * sums);
  return launch;
}

Launch launch_of(const SplitGradientsPlan& plan, const NormBackward&) {
  constexpr int kStatic = 20 << 10;  // for float64, the largest
  Launch launch{"split", SplitGradientsPlan::kWhy};
  launch.blocks_x = plan.grid.blocks;
  launch.blocks_y = plan.grid.teams;
  launch.threads = launch.most_threads = kGridThreads;
  launch.per_multiprocessor = kGridBlocks;
  launch.shared_bytes = kStatic;
  launch.cooperative = plan.grid.blocks > 1;
  return launch;
}

Norm forward(const Call& call, bool centered, bool adds) {
  Norm p{};
  p.x = p.weight = address();
  p.y = address();
  p.rows = call.rows;
  p.columns = p.x_row_stride = call.columns;
  p.dtype = p.residual_dtype = p.weight_dtype = call.dtype;
  p.centered = centered;
  if (centered) p.bias = address();
  if (adds) {
    p.residual = address();
    p.sum = address();
    p.residual_row_stride = call.columns;
  }
  return p;
}

NormBackward backward(const Call& call, bool centered, bool adds) {
  NormBackward p{};
  p.grad = p.z = p.weight = p.mean = p.rstd = address();
  p.grad_x = p.grad_weight = address();
  p.rows = call.rows;
  p.columns = p.grad_row_stride = p.z_row_stride = call.columns;
  p.dtype = p.weight_dtype = call.dtype;
  p.centered = centered;
  if (centered) p.grad_bias = address();
  if (adds) {
    p.grad_sum = address();
    p.grad_sum_row_stride = call.columns;
  }
  return p;
}

template <class Problem, class Plan>
void write(const Gpu& gpu, const Call& call, const char* op, const char* operands, const Problem& p,
           const Plan& plan) {
  std::visit(
      [&](const auto& chosen) { plans::write(gpu, call, op, operands, launch_of(chosen, p)); },
      plan);
}

void write_norms(const Gpu& gpu, int64_t rows, int64_t columns) {
  for (const Call& call : calls(rows, columns)) {
    for (const bool centered : {false, true}) {
      for (const bool adds : {false, true}) {
        const char* const operands = centered ? (adds ? "add_layer_norm" : "layer_norm")
                                              : (adds ? "add_rms_norm" : "rms_norm");
        const Norm p = forward(call, centered, adds);
        write(gpu, call, "norm forward", operands, p, cuda::choose(p, call.alignment, gpu.device));
        if (call.dtype != Dtype::float64 && call.alignment == Alignment::vector) {
          plans::write(gpu, call, "norm in E4M3", operands,
                       launch_of(plan_quantized(p, gpu.device), p));
        }
        const NormBackward q = backward(call, centered, adds);
        write(gpu, call, "norm backward", operands, q,
              norm_gradients::choose(q, call.alignment, gpu.device));
      }
    }
    NormBackward p = backward(call, true, false);
    p.grad_x = nullptr;
    write(gpu, call, "norm backward", "layer_norm without grad_x", p,
          norm_gradients::choose(p, call.alignment, gpu.device));
  }
}

const Family kNorm(write_norms);

}  // namespace
}  // namespace torchkiln::plans
