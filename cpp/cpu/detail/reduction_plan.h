#pragma once

// How the CPU cuts a reduction into pieces of work: by its shape and strides alone, so that the
// order of every addition is the same for any number of threads.

#include <algorithm>
#include <cstdint>

#include "torchkiln/kernels/reduction.h"

namespace torchkiln::cpu::TORCHKILN_ISA {

// Elements that outweigh the hand-over to another thread.
inline constexpr int64_t kUnit = 1 << 16;
// Columns whose running sums, and four rows of them, stay in the first-level cache.
inline constexpr int64_t kStrip = 4096;
// Enough pieces for the threads of any machine.
inline constexpr int64_t kMostChunks = 256;

/// The units of work. Of rows: unit = (row, chunk of the row). Of columns: unit = (outer, chunk of
/// the rows, strip of columns).
struct Cut {
  bool is_rows;
  int64_t strips = 1;
  // Narrow rows without gaps are read as one: their columns' sums are added at the end of a unit.
  int64_t fold = 1;
  int64_t chunk;  // elements of a row, or rows
  int64_t chunks;
  int64_t units;
  int64_t units_per_task;

  /// The units of an output are added by reduce_finish().
  bool has_partials() const { return chunks > 1; }
};

inline Cut cut_of(const Reduction& p) {
  const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  Cut cut{};
  cut.strips = cut.fold = 1;
  cut.is_rows = p.inner == 1 || p.reduced_stride <= p.inner_stride;
  int64_t unit = p.reduced;
  if (cut.is_rows) {
    cut.chunk = p.reduced < 2 * kUnit ? p.reduced : kUnit;
    cut.chunks = ceil_div(p.reduced, cut.chunk);
    cut.units = p.outer * p.inner * cut.chunks;
    unit = cut.chunk;
  } else {
    if (p.inner_stride == 1 && p.reduced_stride == p.inner && p.inner <= kStrip / 4) {
      cut.fold = std::min(kStrip / p.inner, p.reduced);
    }
    const int64_t width = std::min(p.inner * cut.fold, kStrip);
    const int64_t rows = p.reduced / cut.fold;
    cut.strips = ceil_div(p.inner * cut.fold, kStrip);
    const int64_t others = p.outer * cut.strips;
    const int64_t most = std::max<int64_t>(kMostChunks / others, 1);
    // A chunk of few rows would cost as much in partial sums as in elements.
    cut.chunks = std::clamp<int64_t>(std::min(rows * width / kUnit, rows / 64), 1, most);
    cut.chunk = ceil_div(rows, cut.chunks);
    cut.chunks = ceil_div(rows, cut.chunk);
    cut.units = others * cut.chunks;
    unit = cut.chunk * width;
  }
  cut.units_per_task = std::max<int64_t>(kUnit / unit, 1);
  return cut;
}

}  // namespace torchkiln::cpu::TORCHKILN_ISA
