#pragma once

// The column sums of a team over its rows, for the gradients of weight and bias.

#include "detail/reduce/common.cuh"
#include "detail/rowwise/grid_team.cuh"
#include "torchkiln/kernels/norm.h"

namespace torchkiln::cuda::norm_gradients {

using namespace rowwise;
namespace {

/// The column sums of a thread. Its columns are team.row_threads() apart.
template <class C, int kLanes, bool kCentered>
struct ColumnSums {
  C weight[kLanes] = {};
  C bias[kCentered ? kLanes : 1] = {};

  /// Stores the block's sums of the columns from `begin` on, and clears them. A team stores them as
  /// a row of partial sums per gradient; a single team stores the gradients. is_first, is_last:
  /// whether these are the first and the last sums of these columns. `shared` has room for the
  /// columns of all threads.
  template <class Team>
  __device__ __forceinline__ void store(const NormBackward& p, const GridPlan& plan,
                                        const Team& team, C* shared, C* partial, int begin,
                                        bool is_first, bool is_last) {
    const auto store = [&](C(&sums)[kLanes], void* result, int64_t chunk) {
      if (result == nullptr) return;
      const int threads = team.row_threads();
      const int width = threads * kLanes;
      C* const to = partial + chunk * p.columns + begin;
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kLanes; ++i) {
        shared[team.row_in_block() * width + i * threads + team.thread()] = sums[i];
        sums[i] = 0;
      }
      __syncthreads();
      const int count = min(width, team.end_column() - begin);
      for (int at = threadIdx.x; at < count; at += kGridThreads) {
        C sum = is_first ? C(0) : to[at];
        for (int row = 0; row < team.block_rows(); ++row) sum += shared[row * width + at];
        if (is_last && plan.teams == 1) {
          reduce::Result{result, p.weight_dtype, 1}.store(begin + at, sum);
        } else {
          to[at] = sum;
        }
      }
    };
    store(weight, p.grad_weight, team.index());
    if constexpr (kCentered)
      store(bias, p.grad_bias, team.index() + (p.grad_weight == nullptr ? 0 : plan.teams));
  }
};

}  // namespace
}  // namespace torchkiln::cuda::norm_gradients
