#pragma once

// Selects the kernel for the backward of bias_act: backward.cu has the table. Includes no header of
// CUDA.

#include <optional>

#include "detail/reduce/plans.h"
#include "torchkiln/kernels/bias_act.h"

namespace torchkiln::cuda {

/// Blocks per SM and rows in flight per thread. A derivative computed from x has more arithmetic,
/// which needs more threads; that leaves fewer registers per thread. Measured on compute capability
/// 9.0, except for single elements: their loads are short, so more threads keep more bytes in
/// flight.
struct BiasActTuning {
  int blocks;
  int rows;
};
constexpr BiasActTuning bias_act_tuning(bool from_input, size_t element, int lanes) {
  if (lanes == 1) return {!from_input ? 4 : element == 8 ? 2 : 3, 8};
  if (!from_input || element == 8) return {2, 4};
  return element == 2 ? BiasActTuning{3, 2} : BiasActTuning{3, 3};
}

/// One pass over all rows, with vectors of `lanes` elements, or with single elements if `lanes` is
/// 1. With `one_row` the gradient of the bias has no sum, and elementwise kernels compute both
/// 1. gradients.
struct BiasActPlan {
  int lanes;
  reduce::columns::Plan columns;
  bool one_row = false;
};

/// Whether elementwise kernels compute both gradients. The derivative of an activation that reads x
/// depends on the scale, so that another scale than 1 needs a kernel for each gradient.
inline bool has_one_long_row(const BiasActBackward& p) {
  const bool from_input = kept_by_bias_act(p.activation) == Saved::input;
  return p.rows == 1 && p.columns >= reduce::columns::kLongRow && p.bias_dtype == p.dtype &&
         (!from_input || (p.scale == 1 && p.bias != nullptr));
}

/// Whether rows of grad, of the saved tensor and of grad_x consist of whole 16-byte vectors.
inline bool uses_vectors(const BiasActBackward& p) {
  const int lanes = device::vector_lanes(p.dtype);
  return device::rows_in_vectors(p.grad_x, lanes, {p.columns}) && p.grad_column_stride == 1 &&
         device::rows_in_vectors(p.grad, lanes, {p.grad_row_stride}) &&
         (kept_by_bias_act(p.activation) != Saved::input ||
          (p.saved_column_stride == 1 &&
           device::rows_in_vectors(p.saved, lanes, {p.saved_row_stride})));
}

/// Returns nullopt if no gradient of the bias is wanted. An elementwise kernel then computes
/// grad_x.
inline std::optional<BiasActPlan> choose(const BiasActBackward& p, const device::Device& device) {
  if (p.grad_bias == nullptr) return std::nullopt;
  const int lanes = uses_vectors(p) ? device::vector_lanes(p.dtype) : 1;
  const bool from_input = kept_by_bias_act(p.activation) == Saved::input;
  const int blocks = bias_act_tuning(from_input, size_of(p.dtype), lanes).blocks;
  return BiasActPlan{lanes, reduce::columns::make_plan(p.rows, p.columns, lanes, blocks, device),
                     has_one_long_row(p)};
}

}  // namespace torchkiln::cuda
