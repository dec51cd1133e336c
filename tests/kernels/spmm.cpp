#include "ops/spmm/choose.h"

#include "ops/spmm/choose_columns.h"
#include "ops/spmm/choose_transpose.h"
#include "plans.h"

namespace torchkiln::plans {
namespace {

using namespace cuda;

struct Sparse {
  const char* name;
  int64_t rows;
  int64_t entries;
};

CsrPattern pattern_of(const Sparse& sparse, int64_t columns) {
  return {address(), address(), false, sparse.rows, columns, sparse.entries, 0, 0};
}

Launch launch_of(const SpmmPlan& plan, Dtype dtype) {
  Launch launch{plan.access == Access::kRows      ? "rows"
                : plan.access == Access::kColumns ? "columns"
                                                  : "spaced",
                plan.why()};
  launch.blocks_x = plan.blocks;
  launch.threads = launch.most_threads = kSpmmThreads;
  launch.per_multiprocessor = spmm_blocks(size_of(dtype), plan.access);
  return launch;
}

Launch launch_of(const EntriesPlan& plan, Dtype) {
  Launch launch{"entries", EntriesPlan::kWhy};
  launch.blocks_x = plan.blocks;
  launch.threads = launch.most_threads = kEntryThreads;
  return launch;
}

template <class Flight>
Launch launch_of(const PiecesPlan<Flight>& plan, Dtype dtype) {
  Launch launch{Flight::kSteps > 1 ? "wide" : "narrow", PiecesPlan<Flight>::kWhy};
  launch.blocks_x = plan.blocks;
  launch.threads = launch.most_threads = kSpmmThreads;
  launch.per_multiprocessor = sampled_blocks<Flight>(size_of(dtype));
  return launch;
}

Launch launch_of(const RankPlan& plan, const CsrPattern&) {
  Launch launch{"ranks", RankPlan::kWhy};
  launch.blocks_x = plan.blocks;
  launch.threads = launch.most_threads = kRankThreads;
  launch.shared_bytes = kMostRanked * 4;
  return launch;
}

Launch launch_of(const CountingPlan& plan, const CsrPattern& pattern) {
  Launch launch{"counting", CountingPlan::kWhy};
  launch.blocks_x = plan.blocks;
  launch.threads = launch.most_threads = kSortThreads;
  launch.shared_bytes = counter_bytes(pattern) + kScanBytes;
  return launch;
}

Launch launch_of(const RadixPlan& plan, const CsrPattern&) {
  Launch launch{"radix", RadixPlan::kWhy};
  launch.blocks_x = std::max(plan.label_blocks, plan.pack_blocks);
  launch.threads = launch.most_threads = kLabelThreads;
  return launch;
}

Launch launch_of(const ColumnsPlan& plan, Dtype dtype) {
  Launch launch{"few columns", ColumnsPlan::kWhy};
  launch.blocks_x = plan.tiles;
  launch.blocks_y = plan.chunks;
  launch.threads = launch.most_threads = kColumnsThreads;
  launch.per_multiprocessor = kColumnsBlocks;
  const int sum = size_of(dtype) == 8 ? 8 : 4;
  launch.shared_bytes = stage_rows(plan.columns) * (plan.columns * sum + 4) + kColumnsThreads * 32;
  return launch;
}

/// Products of the transpose of a matrix with few columns, half of whose elements are stored, and a
/// dense matrix whose rows have `call.columns` elements.
void write_few_columns(const Gpu& gpu, const Call& call) {
  for (const int64_t columns : {8, 32}) {
    SpmmColumns p{};
    p.pattern = pattern_of({"", call.rows, call.rows * columns / 2}, columns);
    p.values = p.out = address();
    p.x = {address(), call.columns, 0};
    p.dtype = call.dtype;
    p.width = call.columns;
    write(gpu, call, "transposed sparse product", std::to_string(columns) + " columns",
          launch_of(cuda::choose(p, gpu.device), call.dtype));
  }
}

/// Products with a dense matrix whose rows have `columns` elements.
void write_products(const Gpu& gpu, const Call& call, const Sparse& sparse) {
  Spmm p{};
  p.pattern = pattern_of(sparse, 4 * call.rows);
  p.values = address();
  p.dense = {address(), call.columns, 0};
  p.out = address();
  p.dtype = call.dtype;
  p.batch = 1;
  p.width = call.columns;
  write(gpu, call, "sparse product", sparse.name, launch_of(cuda::choose(p), call.dtype));
  p.dense.row_stride = 1;
  p.column_stride = p.pattern.columns;
  if (reads_columns(p)) {
    write(gpu, call, "sparse product", std::string(sparse.name) + ", transposed",
          launch_of(cuda::choose(p), call.dtype));
  }
  SampledProduct q{};
  q.pattern = p.pattern;
  q.left = q.right = {address(), call.columns, 0};
  q.out = address();
  q.dtype = call.dtype;
  q.batch = 1;
  q.width = call.columns;
  const auto launch = [&](const auto& plan) { return launch_of(plan, call.dtype); };
  write(gpu, call, "gradient of sparse values", sparse.name, std::visit(launch, cuda::choose(q)));
}

void write_sparse(const Gpu& gpu, int64_t rows, int64_t columns) {
  const Sparse matrices[] = {{"16 entries a row", rows, 16 * rows},
                             {"1 entry a row", rows, rows},
                             {"1 long row", 1, 16 * rows}};
  for (const Call& call : calls(rows, columns)) {
    if (call.alignment == Alignment::scalar && size_of(call.dtype) != 8) continue;
    for (const Sparse& sparse : matrices) write_products(gpu, call, sparse);
    write_few_columns(gpu, call);
  }
  // The transposition, which has a counter of 4 bytes per column.
  const Call call{rows, columns, Dtype::float32, Alignment::vector};
  for (const Sparse& sparse : matrices) {
    const CsrTranspose p{pattern_of(sparse, columns), 1, nullptr};
    write(
        gpu, call, "transposed pattern", sparse.name,
        std::visit([&](const auto& plan) { return launch_of(plan, p.pattern); }, cuda::choose(p)));
  }
}

const Family kSpmm(write_sparse);

}  // namespace
}  // namespace torchkiln::plans
