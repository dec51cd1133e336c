#include "ops/bias_act/choose.h"
#include "ops/dropout/choose.h"

#include "plans.h"

namespace torchkiln::plans {
namespace {

using namespace device;

Launch launch_of(const reduce::columns::Plan& plan, int lanes, int blocks, Dtype dtype) {
  Launch launch{lanes > 1 ? "vectors" : "elements",
                lanes > 1 ? "One pass writes the gradient of x and sums that of the bias."
                          : "The same, for rows that are not whole vectors."};
  if (plan.fold > 1) {
    launch.kernel = "folded";
    launch.why = "The same, for many adjacent rows of which several together are whole vectors.";
  }
  launch.blocks_x = plan.tiles;
  launch.blocks_y = plan.chunks;
  launch.threads = launch.most_threads = reduce::columns::kThreads;
  launch.per_multiprocessor = blocks;
  launch.shared_bytes = reduce::columns::kThreads * lanes * (size_of(dtype) == 8 ? 8 : 4);
  return launch;
}

Launch launch_of_row() {
  return {"one row", "One long row: elementwise, as the gradient of the bias has no sum."};
}

void write_bias_gradients(const Gpu& gpu, int64_t rows, int64_t columns) {
  for (const Call& call : calls(rows, columns)) {
    if (call.alignment == Alignment::scalar) continue;  // planned as shared_offset
    for (const bool from_input : {false, true}) {
      BiasActBackward p{};
      p.grad = p.saved = p.bias = address();
      p.grad_x = p.grad_bias = address();
      p.dtype = p.bias_dtype = call.dtype;
      p.scale = 1;
      p.activation = from_input ? kActivation<Gelu> : kActivation<Relu>;
      p.rows = call.rows;
      p.columns = p.grad_row_stride = p.saved_row_stride = call.columns;
      p.grad_column_stride = p.saved_column_stride = p.bias_stride = 1;
      const cuda::BiasActPlan plan = *cuda::choose(p, gpu.device);
      const int blocks = cuda::bias_act_tuning(from_input, size_of(call.dtype), plan.lanes).blocks;
      write(
          gpu, call, "gradients of a bias",
          from_input ? "bias_act with gelu" : "bias_act with relu",
          plan.one_row ? launch_of_row() : launch_of(plan.columns, plan.lanes, blocks, call.dtype));
    }
    DropoutBackward p{};
    p.grad = address();
    p.grad_x = p.grad_bias = address();
    p.dtype = p.bias_dtype = call.dtype;
    p.rows = call.rows;
    p.columns = p.grad_row_stride = call.columns;
    p.grad_column_stride = 1;
    const cuda::DropoutPlan plan = cuda::choose(p, gpu.device);
    write(gpu, call, "gradients of a bias", "bias_dropout_add",
          plan.one_row ? launch_of_row()
                       : launch_of(plan.columns, plan.lanes, cuda::kDropoutBlocks, call.dtype));
  }
}

const Family kBias(write_bias_gradients);

}  // namespace
}  // namespace torchkiln::plans
