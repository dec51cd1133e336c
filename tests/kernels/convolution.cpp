#include "ops/convolution/choose.h"

#include "plans.h"

namespace torchkiln::plans {
namespace {

using namespace cuda;

void write_convolutions(const Gpu& gpu, int64_t rows, int64_t columns) {
  for (const Call& call : calls(rows, columns)) {
    if (call.alignment == Alignment::scalar) continue;  // planned as shared_offset
    for (const int64_t out : {64, 256, 1024}) {
      PixelConvolution p{};
      p.x = p.weight = p.y = address();
      p.dtype = call.dtype;
      p.pixels = call.rows;
      p.in = call.columns;
      p.out = out;
      const Launch others{"other ops",
                          "cuDNN and a pass for the moments: no vectors of half precision, too few "
                          "results, or too many idle SMs."};
      Launch launch = others;
      if (const auto plan = cuda::choose(p, gpu.device)) {
        launch = {"sm90", PixelPlan::kWhy};
        launch.blocks_x = plan->blocks.count;
        launch.threads = launch.most_threads = plan->blocks.threads;
        launch.shared_bytes = plan->blocks.shared_bytes;
      }
      const std::string operands = "pixels to " + std::to_string(out) + " channels";
      write(gpu, call, "convolution and moments", operands, launch);
      write(gpu, call, "convolution before batch norm", operands,
            gains(p, gpu.device) ? launch : others);
    }
  }
}

const Family kConvolution(write_convolutions);

}  // namespace
}  // namespace torchkiln::plans
