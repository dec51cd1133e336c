#pragma once

// Gradients of adjacent rows as one array: a vector of logits may belong to two rows. Rows of any
// number of classes are read and written at 16-byte boundaries. A block first prepares the factors
// of its rows in shared memory, while its logits are in flight.

#include <climits>

#include "backward_row.cuh"
#include "torchkiln/device/fast_divide.cuh"

namespace torchkiln::cuda {
namespace {

// Blocks per SM in half precision. On compute capability 7.5 an SM has 1,024 threads.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int kFlatHalfBlocks = 4;
#else
constexpr int kFlatHalfBlocks = 5;
#endif

/// The factors of a row: gradient = slope * exp(logit - log_sum_exp), minus `share` for the target
/// class.
template <class C>
struct FlatRow {
  C slope;
  C log_sum_exp;
  C share;
  int target;  // kIgnored, or another negative number if the class is not in the row

  static constexpr int kIgnored = INT_MIN;
};

/// Writes the gradients of adjacent rows. kLanes is at most the number of classes.
template <class T, int kLanes>
__global__ void __launch_bounds__(kFlatThreads, sizeof(T) == 2 ? kFlatHalfBlocks : 4)
    cross_entropy_flat_gradient(CrossEntropyBackward p, Divisor classes) {
  using C = Compute<T>;
  constexpr int kStep = kFlatThreads * kLanes;
  // The rows of a block. The first and the last one may extend to other blocks.
  __shared__ FlatRow<C> rows[kFlatThreads * kFlatItems + 1];
  wait_for_previous_kernel();
  const int64_t begin = int64_t{blockIdx.x} * (kStep * kFlatItems);
  const int count = static_cast<int>(min(p.rows * p.classes - begin, int64_t{kStep * kFlatItems}));
  const int thread = static_cast<int>(threadIdx.x);
  const T* const logits = static_cast<const T*>(p.logits) + begin;
  T* const grad_logits = static_cast<T*>(p.grad_logits) + begin;
  Vec<T, kLanes> items[kFlatItems];
#pragma unroll
  for (int k = 0; k < kFlatItems; ++k) {
    const int at = k * kStep + thread * kLanes;
    fill(items[k], T(0.0f));
    if (at + kLanes <= count) {
      items[k] = load_vector<kLanes>(logits + at);
    } else {
#pragma unroll
      for (int i = 0; i < kLanes; ++i)
        if (at + i < count) items[k].lane[i] = logits[at + i];
    }
  }

  // Uses a division by multiplication where 32 bits suffice: one 64-bit division would take as long
  // as the gradients of a vector.
  const int64_t first_row =
      begin <= INT_MAX ? classes.quotient(static_cast<uint32_t>(begin)) : begin / p.classes;
  const uint32_t first_column = static_cast<uint32_t>(begin - first_row * p.classes);
  const auto row_of = [&](int at) {
    return static_cast<int>(classes.quotient(first_column + static_cast<uint32_t>(at)));
  };
  for (int r = thread; r <= row_of(count - 1); r += kFlatThreads) {
    const RowGradient<C> row(p, first_row + r);
    const int target = static_cast<int>(row.target.index);
    rows[r] = {row.slope, row.log_sum_exp, row.scale * row.target.weight,
               row.target.ignored ? FlatRow<C>::kIgnored : target};
  }
  __syncthreads();

#pragma unroll
  for (int k = 0; k < kFlatItems; ++k) {
    const int at = k * kStep + thread * kLanes;
    if (at >= count) break;
    const int r = row_of(at);
    const int column = static_cast<int>(first_column) + at - r * static_cast<int>(p.classes);
    const int rest = static_cast<int>(p.classes) - column;  // lanes that belong to the first row
    const FlatRow<C> first = rows[r];
    const FlatRow<C> second = rest < kLanes && at + rest < count ? rows[r + 1] : first;
    C z[kLanes];
    widen(items[k], z);
    if (__all_sync(__activemask(), rest >= kLanes)) {
#pragma unroll
      for (int i = 0; i < kLanes; ++i)
        z[i] = first.slope * MathFor<T>::exp(z[i] - first.log_sum_exp);
    } else {
#pragma unroll
      for (int i = 0; i < kLanes; ++i) {
        const C slope = i < rest ? first.slope : second.slope;
        const C log_sum_exp = i < rest ? first.log_sum_exp : second.log_sum_exp;
        z[i] = slope * MathFor<T>::exp(z[i] - log_sum_exp);
      }
    }
    const auto finish = [&](const FlatRow<C>& row, int row_column, int from, int to) {
      const bool is_ignored = row.target == FlatRow<C>::kIgnored;
      if (!is_ignored && static_cast<unsigned>(row.target - row_column) >= kLanes) return;
#pragma unroll
      for (int i = 0; i < kLanes; ++i) {
        if (i < from || i >= to) continue;
        if (row_column + i == row.target) z[i] -= row.share;
        if (is_ignored) z[i] = 0;
      }
    };
    finish(first, column, 0, rest);
    if (rest < kLanes) finish(second, -rest, rest, kLanes);
    if (at + kLanes <= count) {
      store(grad_logits + at, z);
    } else {
#pragma unroll
      for (int i = 0; i < kLanes; ++i)
        if (at + i < count) grad_logits[at + i] = convert<T>(z[i]);
    }
  }
}

template <class T>
Status launch_flat(const CrossEntropyBackward& p, const CrossEntropyBackwardPlan& plan,
                   CUstream_st* stream) {
  const Divisor classes(static_cast<uint32_t>(p.classes));
  const Grid grid{dim3(static_cast<unsigned>(plan.blocks)), dim3(kFlatThreads)};
  return *plan.flat_lanes == 1
             ? launch_overlapped(cross_entropy_flat_gradient<T, 1>, grid, stream, p, classes)
             : launch_overlapped(cross_entropy_flat_gradient<T, kVectorLanes<T>>, grid, stream, p,
                                 classes);
}

}  // namespace
}  // namespace torchkiln::cuda
