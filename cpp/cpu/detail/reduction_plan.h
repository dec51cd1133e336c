#pragma once

// The split of a reduction into units of work on the CPU. It depends on shape and strides alone, so
// that additions have the same order with any number of threads.

#include <algorithm>
#include <cstdint>

#include "torchkiln/kernels/reduction.h"

namespace torchkiln::cpu::TORCHKILN_ISA {

// Elements per unit. A unit then takes longer than starting a thread.
inline constexpr int64_t kUnit = 1 << 16;
// Columns per strip, so that their running sums and four rows of them stay in the L1 cache.
inline constexpr int64_t kStrip = 4096;
// Maximum number of chunks: units enough for the threads of any machine.
inline constexpr int64_t kMaxChunks = 256;

/// The units of work. For row sums, a unit is a chunk of a row; for column sums, it is a strip of
/// columns in a chunk of the rows of one `outer`.
struct Plan {
  bool is_rows;
  int64_t strips = 1;
  // `fold` narrow dense rows are read as one row. At the end of a unit, the sums of equal columns
  // are added.
  int64_t fold = 1;
  int64_t chunk;  // elements of a row, or rows, per unit
  int64_t chunks;
  int64_t units;
  int64_t units_per_task;

  /// Whether several units share an output, so that reduce_finish() adds their partial sums.
  bool has_partials() const { return chunks > 1; }
};

inline Plan make_plan(const Reduction& p) {
  const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  Plan plan{};
  plan.strips = plan.fold = 1;
  plan.is_rows = p.inner == 1 || p.reduced_stride <= p.inner_stride;
  int64_t unit = p.reduced;
  if (plan.is_rows) {
    plan.chunk = p.reduced < 2 * kUnit ? p.reduced : kUnit;
    plan.chunks = ceil_div(p.reduced, plan.chunk);
    plan.units = p.outer * p.inner * plan.chunks;
    unit = plan.chunk;
  } else {
    if (p.inner_stride == 1 && p.reduced_stride == p.inner && p.inner <= kStrip / 4) {
      plan.fold = std::min(kStrip / p.inner, p.reduced);
    }
    const int64_t width = std::min(p.inner * plan.fold, kStrip);
    const int64_t rows = p.reduced / plan.fold;
    plan.strips = ceil_div(p.inner * plan.fold, kStrip);
    const int64_t others = p.outer * plan.strips;
    const int64_t most = std::max<int64_t>(kMaxChunks / others, 1);
    // At least 64 rows per chunk: with fewer, reading partial sums would take as long as reading
    // the elements.
    plan.chunks = std::clamp<int64_t>(std::min(rows * width / kUnit, rows / 64), 1, most);
    plan.chunk = ceil_div(rows, plan.chunks);
    plan.chunks = ceil_div(rows, plan.chunk);
    plan.units = others * plan.chunks;
    unit = plan.chunk * width;
  }
  plan.units_per_task = std::max<int64_t>(kUnit / unit, 1);
  return plan;
}

}  // namespace torchkiln::cpu::TORCHKILN_ISA
