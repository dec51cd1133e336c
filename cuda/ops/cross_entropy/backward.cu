// grad_logits = grad / divisor * (mass * exp(logits - log_sum_exp) - q), with the symbols of
// kernels/cross_entropy.h, from the state that forward saved. Every element is read and written
// once. Gradients of log-probabilities and entropies have the plan rows.
//
//   plan    kernel                         when
//   flat    cross_entropy_flat_gradient    one class per row; adjacent rows that are short or not
//                                          whole vectors, as one array (backward_flat.cuh)
//   rows    cross_entropy_gradient         otherwise: a block has a part of a row, or several rows
//
// backward_row.cuh has the factors of a row.

#include "backward_flat.cuh"

namespace torchkiln::cuda {
namespace {

/// Stores a vector of gradients, whose type may be narrower than that of the logits.
template <class Access, class To, class C>
__device__ __forceinline__ void save(const Access& access, To* row, int column,
                                     const C (&values)[Access::kLanes]) {
  if constexpr (std::is_same_v<To, typename Access::T>) {
    access.save(row, column, values);
  } else if (access.has_all(column)) {
    store(row + column, values);
  } else {
#pragma unroll
    for (int i = 0; i < Access::kLanes; ++i)
      if (access.has(column, i)) row[column + i] = convert<To>(values[i]);
  }
}

/// Writes gradients of type To. All values that depend on the whole row were saved by forward.
template <class Access, RowForm kForm, class To = typename Access::T>
__global__ void __launch_bounds__(kLossGradientThreads, 4)
    cross_entropy_gradient(CrossEntropyBackward p, GradientShape shape) {
  using T = typename Access::T;
  using C = Compute<T>;
  using Math = MathFor<T>;
  using Item = typename Access::Item;
  constexpr bool kSpread = kForm == RowForm::spread;
  constexpr int kLanes = Access::kLanes;
  wait_for_previous_kernel();
  const unsigned parts = static_cast<unsigned>(shape.parts);
  const unsigned group = parts == 1 ? blockIdx.x : blockIdx.x / parts;
  const int part = static_cast<int>(blockIdx.x - group * parts);
  const int step = shape.team.threads;
  const int row_in_block = static_cast<int>(threadIdx.x) >> shape.team.log_threads;
  const int rank = static_cast<int>(threadIdx.x) - row_in_block * step;
  const int64_t row = int64_t{group} * shape.team.per_block + row_in_block;
  if (row >= p.rows) return;
  const T* logits = static_cast<const T*>(p.logits) + row * p.row_stride;
  To* grad_logits = static_cast<To*>(p.grad_logits) + row * p.grad_logits_row_stride;
  const Access access(logits, static_cast<int>(p.classes));
  const int begin = part * shape.vectors_per_part + rank;
  const int end = min(access.vectors(), (part + 1) * shape.vectors_per_part);
  Access part_access = access;  // only the columns of this part
  part_access.columns = min(access.columns, access.column(end));
  Item items[kLossGradientItems];
  const bool can_overread = Access::can_overread(row, p.rows, p.row_stride);
  const auto load = [&](int first) {
    part_access.load(logits, access.column(first), step * kLanes, items, T(0.0f), can_overread);
  };
  load(begin);

  RowGradient<C> gradient(p, row);
  if constexpr (kForm == RowForm::logprob) gradient.use_logprob(p, row);
  const RowTarget<C>& target = gradient.target;
  const Distribution<Access, C> distribution(p.target, row, target.index);
  const C factor = static_cast<C>(p.factor);
  for (int first = begin; first < end; first += kLossGradientItems * step) {
    if (first != begin) load(first);
#pragma unroll
    for (int k = 0; k < kLossGradientItems; ++k) {
      const int vector = first + k * step;
      if (vector >= end) break;
      const int column = access.column(vector);
      C z[kLanes];
      widen(items[k], z);
#pragma unroll
      for (int i = 0; i < kLanes; ++i) {
        if constexpr (kForm == RowForm::logprob) {
          const C exponent = rounded_product(z[i], factor) - gradient.log_sum_exp;
          const C bounded = fmax(exponent, kLeastExponent<C>);
          z[i] = (gradient.slope + gradient.tilt * bounded) * Math::exp(exponent);
        } else {
          z[i] = gradient.slope * Math::exp(z[i] - gradient.log_sum_exp);
        }
      }
      if constexpr (kSpread) {
        C q[kLanes];
        distribution.load(access, column, q);
#pragma unroll
        for (int i = 0; i < kLanes; ++i) z[i] -= gradient.scale * q[i];
      } else if (static_cast<unsigned>(distribution.index - access.column(vector)) < kLanes) {
#pragma unroll
        for (int i = 0; i < kLanes; ++i)
          if (column + i == distribution.index) z[i] -= gradient.scale * target.weight;
      }
      if (target.ignored) {
#pragma unroll
        for (int i = 0; i < kLanes; ++i) z[i] = 0;
      }
      save(access, grad_logits, column, z);
    }
  }
}

}  // namespace

Status cross_entropy_backward(const CrossEntropyBackward& given, CUstream_st* stream) {
  const CrossEntropyBackward p = with_all_classes(given);
  if (p.rows == 0 || p.classes == 0) return {};
  if (p.classes > kMaxColumns) return {kTooLong};
  const CrossEntropyBackwardPlan plan = choose(p, alignment_of_rows(p));
  if (plan.blocks > kMaxGridX) return {"too many rows for one launch"};
  return dispatch_floating(p.dtype, [&](auto tag) {
    using T = typename std::decay_t<decltype(tag)>::type;
    if (plan.flat_lanes) return launch_flat<T>(p, plan, stream);
    return with_vectors<T>(plan.alignment, [&](auto access) {
      using Access = typename std::decay_t<decltype(access)>::type;
      const TeamShape& team = plan.shape.team;
      const Grid grid{dim3(static_cast<unsigned>(plan.blocks)),
                      dim3(static_cast<unsigned>(team.block_threads()))};
      const auto launch = [&](auto kernel) {
        return launch_overlapped(kernel, grid, stream, p, plan.shape);
      };
      switch (form_of(p)) {
        case RowForm::spread:
          return launch(cross_entropy_gradient<Access, RowForm::spread>);
        case RowForm::logprob:
          if constexpr (std::is_same_v<T, float>) {
            if (p.grad_logits_dtype == Dtype::float16)
              return launch(cross_entropy_gradient<Access, RowForm::logprob, __half>);
            if (p.grad_logits_dtype == Dtype::bfloat16)
              return launch(cross_entropy_gradient<Access, RowForm::logprob, __nv_bfloat16>);
          }
          return launch(cross_entropy_gradient<Access, RowForm::logprob>);
        default:
          return launch(cross_entropy_gradient<Access, RowForm::target>);
      }
    });
  });
}

}  // namespace torchkiln::cuda
