#pragma once

// Plans a reduction over any dimensions as steps of the kernels, which reduce the middle dimension
// of [outer, reduced, inner].
//
// Dimensions are sorted by stride and merged with their neighbours in memory. Most reductions then
// need one step. If kept dimensions lie between reduced ones, each group of reduced dimensions is a
// step, the largest first, with an intermediate in the accumulation dtype.

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <optional>

#include "torchkiln/kernels/reduction.h"
#include "torchkiln/torch/elementwise.h"
#include "torchkiln/torch/note.h"

namespace torchkiln {

/// Whether each dimension is reduced.
using Mask = c10::SmallVector<bool, 8>;

struct Axis {
  int64_t size;
  int64_t stride;
  bool is_reduced;
  int64_t dim;
};

/// Axes by stride, the outermost first.
using Axes = c10::SmallVector<Axis, 8>;

inline Axes axes_in_memory(const at::Tensor& x, const Mask& mask) {
  Axes axes;
  for (int64_t d = 0; d < x.dim(); ++d) {
    if (x.size(d) != 1) axes.push_back({x.size(d), x.stride(d), mask[d], d});
  }
  std::stable_sort(axes.begin(), axes.end(),
                   [](const Axis& a, const Axis& b) { return a.stride > b.stride; });
  return axes;
}

/// Whether two adjacent axes can be merged: one stride covers both.
inline bool merge(const Axis& outer, const Axis& inner) {
  return outer.stride == inner.stride * inner.size;
}

/// Merges adjacent axes if both are reduced or both are kept.
inline Axes merged(const Axes& axes) {
  Axes result;
  for (const Axis& axis : axes) {
    if (!result.empty() && result.back().is_reduced == axis.is_reduced &&
        merge(result.back(), axis)) {
      result.back().size *= axis.size;
      result.back().stride = axis.stride;
    } else {
      result.push_back(axis);
    }
  }
  return result;
}

/// Merges the axes begin <= i < end into at most two; nullopt if more remain.
inline std::optional<std::array<Axis, 2>> two_axes(const Axes& axes, size_t begin, size_t end) {
  std::array<Axis, 2> pair{Axis{1, 0, false, 0}, Axis{1, 0, false, 0}};
  int used = 0;
  for (size_t i = begin; i < end; ++i) {
    if (used > 0 && merge(pair[used - 1], axes[i])) {
      pair[used - 1].size *= axes[i].size;
      pair[used - 1].stride = axes[i].stride;
      continue;
    }
    if (used == 2) return std::nullopt;
    pair[used++] = axes[i];
  }
  return pair;
}

/// The step that sums over axis `at`; nullopt if the kernels cannot read it. They read rows that
/// lie along up to two dimensions, or one dimension on either side of the reduced one.
inline std::optional<Reduction> step_over(const Axes& axes, size_t at) {
  const auto before = two_axes(axes, 0, at);
  const auto after = two_axes(axes, at + 1, axes.size());
  if (!before || !after) return std::nullopt;
  const bool is_last = at + 1 == axes.size();
  if (after->back().size > 1 || (!is_last && before->back().size > 1)) return std::nullopt;
  const Axis& inner = is_last ? before->back() : after->front();
  Reduction step{};
  step.outer = before->front().size;
  step.outer_stride = before->front().stride;
  step.reduced = axes[at].size;
  step.reduced_stride = axes[at].stride;
  step.inner = inner.size;
  step.inner_stride = inner.stride;
  return step;
}

/// The step that leaves the fewest elements.
inline std::optional<Reduction> best_step(const Axes& axes, size_t& at) {
  std::optional<Reduction> best;
  for (size_t i = 0; i < axes.size(); ++i) {
    if (!axes[i].is_reduced || (best && axes[i].size < best->reduced)) continue;
    if (const auto step = step_over(axes, i)) {
      best = step;
      at = i;
    }
  }
  return best;
}

inline void make_contiguous(Axes& axes) {
  int64_t stride = 1;
  for (size_t i = axes.size(); i-- > 0; stride *= axes[i].size) axes[i].stride = stride;
}

/// Calls run(step, is_last) for each step from x to `out`. `out` is contiguous and not empty.
template <class Run>
void reduce_in_steps(const at::Tensor& x, const Mask& mask, const at::Tensor& out, const Run& run) {
  Axes axes = axes_in_memory(x, mask);
  c10::SmallVector<int64_t, 8> kept, kept_sizes;
  for (const Axis& axis : axes) {
    if (axis.is_reduced) continue;
    kept.push_back(axis.dim);
    kept_sizes.push_back(axis.size);
  }
  // The kernels write sums in memory order. If the output has another order, they write to a
  // temporary tensor, which is copied.
  const bool in_order = std::is_sorted(kept.begin(), kept.end());
  const at::Tensor sums = in_order ? out : at::empty(kept_sizes, out.options());
  const bool is_wide = x.scalar_type() == at::kDouble || out.scalar_type() == at::kDouble;
  const at::TensorOptions between = out.options().dtype(is_wide ? at::kDouble : at::kFloat);

  at::Tensor from = x;
  for (bool is_last = false; !is_last;) {
    axes = merged(axes);
    size_t at = 0;
    std::optional<Reduction> step = best_step(axes, at);
    if (!step) {
      trace::note("copied: strides ", from.strides(),
                  " have more dimensions that do not merge than the kernels read");
      c10::SmallVector<int64_t, 8> sizes, strides;
      for (const Axis& axis : axes) sizes.push_back(axis.size), strides.push_back(axis.stride);
      from = from.as_strided(sizes, strides).clone(at::MemoryFormat::Contiguous);
      make_contiguous(axes);
      continue;
    }
    axes.erase(axes.begin() + at);
    is_last = std::none_of(axes.begin(), axes.end(), [](const Axis& a) { return a.is_reduced; });
    const at::Tensor to = is_last ? sums : at::empty({step->outer * step->inner}, between);
    step->in = from.const_data_ptr();
    step->out = to.data_ptr();
    step->dtype = dtype_of(from);
    step->out_dtype = dtype_of(to);
    run(*step, is_last);
    make_contiguous(axes);
    from = to;
  }
  if (in_order) return;
  trace::note("copied: the sums are in memory order, the result in the order of dimensions");
  c10::SmallVector<int64_t, 8> order(kept.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return kept[a] < kept[b]; });
  const at::Tensor result = sums.permute(order);
  out.view(result.sizes()).copy_(result);
}

}  // namespace torchkiln
