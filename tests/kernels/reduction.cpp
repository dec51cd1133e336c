#include "ops/reduction/choose.h"

#include "plans.h"

namespace torchkiln::plans {
namespace {

using namespace cuda;
using namespace reduce;

/// Bytes of an accumulator: float64 for float64, else float32.
int accumulator_bytes(Dtype dtype) { return size_of(dtype) == 8 ? 8 : 4; }

Launch launch_of(const ReductionPlan& plan, const Call& call) {
  Launch launch;
  if (!plan.in_rows) {
    launch.kernel = plan.access.fold > 1 ? "folded columns" : "columns";
    launch.why = plan.access.fold > 1
                     ? "Rows that are not whole vectors: several are read as one that is."
                     : "Each thread has a vector of columns; its sums stay in registers.";
    launch.blocks_x = plan.columns.tiles;
    launch.blocks_y = plan.columns.chunks;
    launch.threads = launch.most_threads = columns::kThreads;
    launch.per_multiprocessor = kColumnBlocks;
    launch.shared_bytes = columns::kThreads * plan.access.lanes * accumulator_bytes(call.dtype);
    return launch;
  }
  launch.threads = plan.rows.threads;
  launch.most_threads = rows::kThreads;
  launch.blocks_x = ceil_div(plan.shape.count(), rows::kThreads / kWarpLanes);
  switch (plan.rows.kind) {
    case rows::Kind::packed_vectors:
    case rows::Kind::packed_elements:
      launch.kernel = "packed";
      launch.why = "Short rows: each takes a few lanes of a warp, and a thread has eight of them.";
      break;
    case rows::Kind::staged:
      launch.kernel = "staged";
      launch.why =
          "Short rows, close together: a block copies many to shared memory in whole vectors.";
      launch.blocks_x = ceil_div(plan.shape.count(), plan.rows.tile);
      launch.shared_bytes = rows::kTileBytes + kVectorBytes;
      break;
    case rows::Kind::warp_per_row:
      launch.kernel = "warp";
      launch.why = "Half of the threads of a block would have no load.";
      launch.per_multiprocessor = rows::kBlocksPerMultiprocessor;
      break;
    case rows::Kind::block_per_row:
      launch.kernel = plan.rows.parts > 1 ? "parts" : "block";
      launch.why = plan.rows.parts > 1 ? "Long rows that do not fill the GPU; a second kernel adds."
                                       : "All loads of a row are in flight together.";
      launch.blocks_x = plan.shape.count() * plan.rows.parts;
      launch.per_multiprocessor = rows::kBlocksPerMultiprocessor;
  }
  return launch;
}

void write_sums(const Gpu& gpu, int64_t rows, int64_t columns) {
  for (const Call& call : calls(rows, columns)) {
    if (call.alignment == Alignment::scalar) continue;  // planned as shared_offset
    Reduction p{};
    p.in = p.out = address();
    p.dtype = p.out_dtype = call.dtype;
    p.outer = call.rows;
    p.reduced = p.outer_stride = call.columns;
    p.inner = p.inner_stride = p.reduced_stride = 1;
    write(gpu, call, "sum", "sum over the last dimension",
          launch_of(cuda::choose(p, gpu.device), call));
    p.outer = 1;
    p.reduced = call.rows;
    p.inner = p.reduced_stride = call.columns;
    write(gpu, call, "sum", "sum over the first dimension",
          launch_of(cuda::choose(p, gpu.device), call));
  }
}

const Family kReduction(write_sums);

}  // namespace
}  // namespace torchkiln::plans
