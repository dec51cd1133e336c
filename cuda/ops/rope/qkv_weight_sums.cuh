#pragma once

// The arguments of a backward kernel of qkv_norm_rope, and the gradients of the weights. Each block
// writes its sums; a second kernel adds them in a fixed order.

#include <algorithm>

#include "ops/rope/qkv.cuh"

namespace torchkiln::cuda {

/// Partial sums of the blocks: rows[kind] rows of columns[kind] elements. grad[kind] gets their
/// total.
struct WeightSums {
  void* sums[2];  // for queries and keys; null if not wanted
  int64_t rows[2];
  int64_t columns[2];
  void* grad[2];
};

/// Allocates the partial sums that are wanted.
template <class T>
WeightSums make_weight_sums(const QkvNormRopeBackward& arguments, int64_t query_rows,
                            int64_t key_rows, Allocate allocate) {
  using C = Compute<T>;
  WeightSums found{};
  int64_t begins[3] = {};
  for (int kind = 0; kind < 2; ++kind) {
    found.grad[kind] = arguments.grad_weight[kind];
    found.rows[kind] = kind == kQueries ? query_rows : key_rows;
    found.columns[kind] = arguments.forward.norm_size(kind);
    begins[kind + 1] = begins[kind];
    if (found.grad[kind] != nullptr) begins[kind + 1] += found.rows[kind] * found.columns[kind];
  }
  if (begins[2] == 0) return found;
  C* const memory = static_cast<C*>(allocate(static_cast<size_t>(begins[2]) * sizeof(C)));
  for (int kind = 0; kind < 2; ++kind)
    if (found.grad[kind] != nullptr) found.sums[kind] = memory + begins[kind];
  return found;
}

/// blockIdx.y selects the weight: of queries or of keys.
template <class C, class W>
__global__ void __launch_bounds__(kFinishThreads) add_weight_sums(const WeightSums p) {
  wait_for_previous_kernel();
  __shared__ C shared[kFinishThreads];
  const int kind = static_cast<int>(blockIdx.y);
  if (p.grad[kind] == nullptr) return;
  const int columns = static_cast<int>(blockDim.x), rows = static_cast<int>(blockDim.y);
  const int64_t column = int64_t{blockIdx.x} * columns + threadIdx.x;
  C sum = C(0);
  if (column < p.columns[kind]) {
    const C* const from = static_cast<const C*>(p.sums[kind]) + column;
    for (int64_t row = threadIdx.y; row < p.rows[kind]; row += rows)
      sum += from[row * p.columns[kind]];
  }
  shared[threadIdx.y * columns + threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || column >= p.columns[kind]) return;
#pragma unroll 8
  for (int i = 1; i < rows; ++i) sum += shared[i * columns + threadIdx.x];
  static_cast<W*>(p.grad[kind])[column] = convert<W>(sum);
}

/// Adds the partial sums, if any are wanted.
template <class T>
Status finish_weight_sums(const WeightSums& sums, Dtype weight_dtype, CUstream_st* stream) {
  if (sums.grad[0] == nullptr && sums.grad[1] == nullptr) return {};
  const int64_t columns = std::max(sums.columns[0], sums.columns[1]);
  const FinishThreads threads = finish_threads(std::max(sums.rows[0], sums.rows[1]));
  Grid grid{};
  grid.blocks = dim3(static_cast<unsigned>(ceil_div(columns, threads.columns)), 2);
  grid.threads = dim3(threads.columns, threads.rows);
  return with_parameter_type<T>(weight_dtype, [&](auto tag) {
    using W = typename decltype(tag)::type;
    return launch_overlapped(add_weight_sums<Compute<T>, W>, grid, stream, sums);
  });
}

struct QkvBackwardPlan {
  QkvPlan plan;  // as in forward
  const void* grad[3];
  int64_t grad_stride[3][3];
  void* grad_qkv;
  void* sums[2];  // rows of WeightSums; null if not wanted
};

inline QkvBackwardPlan make_backward_plan(const QkvPlan& plan, const QkvNormRopeBackward& arguments,
                                          const WeightSums& sums) {
  QkvBackwardPlan backward{};
  backward.plan = plan;
  backward.grad_qkv = arguments.grad_qkv;
  for (int kind = 0; kind < 3; ++kind) {
    backward.grad[kind] = arguments.grad[kind];
    for (int d = 0; d < 3; ++d) backward.grad_stride[kind][d] = arguments.grad_stride[kind][d];
    if (kind < kValues) backward.sums[kind] = sums.sums[kind];
  }
  return backward;
}

}  // namespace torchkiln::cuda
