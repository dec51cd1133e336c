#pragma once

// Losses of short rows with any alignment. A block copies adjacent rows as one array to shared
// memory, in whole vectors. Teams of a few threads then read one row each.

#include <cuda_pipeline.h>

#include "forward_row.cuh"

namespace torchkiln::cuda {
namespace {

template <class T>
constexpr int kFlatElements = flat_elements(sizeof(T));

/// kLanes: elements that a thread reads together, a divisor of the number of classes.
template <class T, int kLanes>
__global__ void __launch_bounds__(kFlatLossThreads)
    cross_entropy_flat_rows(CrossEntropy p, TeamShape shape) {
  using C = Compute<T>;
  using Math = MathFor<T>;
  extern __shared__ __align__(kVectorBytes) unsigned char memory[];
  __shared__ C maxima[kFlatLossThreads];
  __shared__ C sums[kFlatLossThreads];
  T* const tile = reinterpret_cast<T*>(memory);
  wait_for_previous_kernel();
  const int thread = static_cast<int>(threadIdx.x);
  const int classes = static_cast<int>(p.classes);
  const int64_t first_row = int64_t{blockIdx.x} * shape.per_block;
  const int rows = static_cast<int>(min(p.rows - first_row, int64_t{shape.per_block}));
  const T* const logits = static_cast<const T*>(p.logits) + first_row * classes;
  constexpr int kVector = kVectorLanes<T>;
  const int whole = rows * classes / kVector * kVector;
  for (int at = thread * kVector; at < whole; at += kFlatLossThreads * kVector)
    __pipeline_memcpy_async(tile + at, logits + at, kVectorBytes);
  __pipeline_commit();
  if (whole + thread < rows * classes) tile[whole + thread] = logits[whole + thread];
  RowTarget<C> target{};
  if (thread < rows) target = target_of<C>(p.target, first_row + thread, classes);
  __pipeline_wait_prior(0);
  __syncthreads();

  const int r = thread >> shape.log_threads;
  const int rank = thread & (shape.threads - 1);
  const int end = r < rows ? classes : 0;
  const auto column = [&](int k) { return (rank + k * shape.threads) * kLanes; };
  constexpr int kItems = kFlatElements<T> / kLanes;
  Vec<T, kLanes> items[kItems], most;
  fill(most, T(-INFINITY));
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    if (column(k) >= end) break;
    items[k] = load_vector<kLanes>(tile + r * classes + column(k));
    most = elementwise_max(most, items[k]);
  }
  const Vec<T, kLanes> all[] = {most};
  const C largest = reduce_warp(max_of<C>(all), Max{}, shape.threads);
  const C reference = SumOfExponentials<Math>::reference(largest);
  C sum = 0;
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    if (column(k) >= end) break;
    C z[kLanes];
    widen(items[k], z);
#pragma unroll
    for (int i = 0; i < kLanes; ++i) sum += Math::exp(z[i] - reference);
  }
  sum = reduce_warp(sum, Sum{}, shape.threads);
  if (rank == 0 && r < rows) {
    maxima[r] = largest;
    sums[r] = sum;
  }
  __syncthreads();
  if (thread >= rows) return;
  const T* const row = tile + thread * classes;
  const C logit = target.index >= 0 ? convert<C>(row[target.index]) : C(0);
  const C values[] = {maxima[thread], sums[thread]};
  (void)finish_row<RowForm::target>(p, first_row + thread, row, target, C(0), logit, values);
}

template <class T>
Status launch_flat_rows(const CrossEntropy& p, const FlatRows& plan, CUstream_st* stream) {
  Grid grid;
  const Status status = make_grid(plan.team, p.rows, grid);
  if (!status.ok()) return status;
  grid.shared_bytes = plan.shared_bytes;
  const auto launch = [&](auto kernel) {
    return launch_overlapped(kernel, grid, stream, p, plan.team);
  };
  if constexpr (kVectorLanes<T> > 4) {
    if (plan.lanes == 4) return launch(cross_entropy_flat_rows<T, 4>);
  }
  if constexpr (kVectorLanes<T> > 2) {
    if (plan.lanes == 2) return launch(cross_entropy_flat_rows<T, 2>);
  }
  return launch(cross_entropy_flat_rows<T, 1>);
}

}  // namespace
}  // namespace torchkiln::cuda
