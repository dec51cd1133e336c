// Gradients of norms with few rows, whose tensors stay in L2:
//
//   blocks 0 ... strips - 1   sum strips of columns over all rows: grad_weight, grad_bias
//   all further blocks        read whole rows: grad_x
//
// Both read grad and z; the second read from L2 costs less than partial sums that a second kernel
// would have to wait for.

#include "backward_common.cuh"

namespace torchkiln::cuda::norm_gradients {
namespace {

template <class Access, class W, bool kCentered, bool kAdds>
__device__ __forceinline__ void gradients_of_rows(const NormBackward& p, const TeamShape& shape,
                                                  int group) {
  using T = typename Access::T;
  using C = Compute<T>;
  constexpr int kLanes = Access::kLanes;
  __shared__ TeamStorage<C, 2> storage;
  Team<C, 2, true> team(shape, storage);
  const int64_t row = int64_t{group} * shape.per_block + team.index();
  const bool inside = row < p.rows;
  const T* grad = static_cast<const T*>(p.grad) + row * p.grad_row_stride;
  const T* z = static_cast<const T*>(p.z) + row * p.z_row_stride;
  const T* grad_sum = static_cast<const T*>(p.grad_sum) + row * p.grad_sum_row_stride;
  const int columns = inside ? static_cast<int>(p.columns) : 0;
  const RowTile<Access, kItems> tile(grad, columns, team.rank(), team.size());

  typename Access::Item grads[kItems], inputs[kItems], others[kItems];
  tile.load(grad, grads);
  tile.load(z, inputs);
  const C mean = kCentered && inside ? static_cast<const C*>(p.mean)[row] : C(0);
  const C rstd = inside ? static_cast<const C*>(p.rstd)[row] : C(0);

  // Weights are loaded twice, because the loads in flight need the registers.
  const auto read = [&](int k, C(&d)[kLanes], C(&n)[kLanes]) {
    C weight[kLanes] = {};
    if (tile.has_any(k)) load_weight<W>(p, tile.access(), tile.column(k), weight);
    widen(grads[k], d);
    widen(inputs[k], n);
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      d[i] *= weight[i];
      n[i] = (n[i] - mean) * rstd;
    }
  };
  C sums[kCentered ? 2 : 1] = {};
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    C d[kLanes], n[kLanes];
    read(k, d, n);
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      sums[0] += d[i] * n[i];
      if constexpr (kCentered) sums[1] += d[i];
    }
  }
  // These loads are in flight during the reduction.
  if constexpr (kAdds) tile.load(grad_sum, others);
  team.reduce(sums, Sum{});
  const C inverse_columns = C(1) / static_cast<C>(p.columns);
  const C scale = factor_of_gradient<kCentered>(p, rstd);
  const C slope = -scale * inverse_columns * sums[0];
  const C level = kCentered ? -scale * inverse_columns * sums[kCentered ? 1 : 0] : C(0);
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    C result[kLanes], n[kLanes];
    read(k, result, n);
#pragma unroll
    for (int i = 0; i < kLanes; ++i) result[i] = result[i] * scale + (n[i] * slope + level);
    if constexpr (kAdds) {
      C other[kLanes];
      widen(others[k], other);
#pragma unroll
      for (int i = 0; i < kLanes; ++i) result[i] += other[i];
    }
    tile.save(inside, static_cast<T*>(p.grad_x) + row * p.columns, k, result);
  }
}

/// Adds a row's terms of the column sums.
template <int kLanes, bool kCentered, class T, class C>
__device__ __forceinline__ void add_terms(const NormBackward& p, int64_t row, const T* grad,
                                          const T* z, C (&sums)[kCentered ? 2 : 1][kLanes]) {
  const C mean = kCentered ? static_cast<const C*>(p.mean)[row] : C(0);
  const C rstd = static_cast<const C*>(p.rstd)[row];
  C g[kLanes], x[kLanes];
  widen(load_vector<kLanes>(grad + row * p.grad_row_stride), g);
  widen(load_vector<kLanes>(z + row * p.z_row_stride), x);
#pragma unroll
  for (int i = 0; i < kLanes; ++i) {
    sums[0][i] += g[i] * ((x[i] - mean) * rstd);
    if constexpr (kCentered) sums[1][i] += g[i];
  }
}

/// Sums a strip of columns, as wide as the block, over up to kRowsOfThread rows.
template <class Access, class W, bool kCentered>
__device__ __forceinline__ void sums_of_short_columns(const NormBackward& p, int strip) {
  using T = typename Access::T;
  using C = Compute<T>;
  constexpr int kLanes = Access::kLanes;
  constexpr int kSums = kCentered ? 2 : 1;
  const int64_t column = (int64_t{strip} * blockDim.x + threadIdx.x) * kLanes;
  if (column >= p.columns) return;
  C sums[kSums][kLanes] = {};
#pragma unroll
  for (int row = 0; row < kRowsOfThread; ++row) {
    if (row < p.rows) {
      add_terms<kLanes, kCentered>(p, row, static_cast<const T*>(p.grad) + column,
                                   static_cast<const T*>(p.z) + column, sums);
    }
  }
#pragma unroll
  for (int which = 0; which < kSums; ++which) {
    auto* to = static_cast<W*>(which == 0 ? p.grad_weight : p.grad_bias);
    if (to != nullptr) store(to + column, sums[which]);
  }
}

/// Sums a strip of columns, kStripThreads threads wide: each thread adds every n-th row, then the
/// threads of a warp are reduced, then the warps.
template <class Access, class W, bool kCentered>
__device__ __forceinline__ void sums_of_columns(const NormBackward& p, int strip) {
  using T = typename Access::T;
  using C = Compute<T>;
  constexpr int kLanes = Access::kLanes;
  constexpr int kWidth = kStripThreads * kLanes;
  constexpr int kSums = kCentered ? 2 : 1;
  __shared__ C slots[kFewThreads / kWarpLanes][kSums][kWidth];
  const int thread = static_cast<int>(threadIdx.x);
  const int begin = strip * kWidth;
  const int column = begin + thread % kStripThreads * kLanes;
  C sums[kSums][kLanes] = {};
  if (column < p.columns) {
    const T* grad = static_cast<const T*>(p.grad) + column;
    const T* z = static_cast<const T*>(p.z) + column;
    const int step = static_cast<int>(blockDim.x) / kStripThreads;
#pragma unroll 4
    for (int64_t row = thread / kStripThreads; row < p.rows; row += step)
      add_terms<kLanes, kCentered>(p, row, grad, z, sums);
  }
#pragma unroll
  for (int which = 0; which < kSums; ++which) {
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
#pragma unroll
      for (int offset = kStripThreads; offset < kWarpLanes; offset *= 2)
        sums[which][i] += __shfl_xor_sync(~0u, sums[which][i], offset);
      if (thread % kWarpLanes < kStripThreads)
        slots[thread / kWarpLanes][which][thread % kStripThreads * kLanes + i] = sums[which][i];
    }
  }
  __syncthreads();
  const int warps = static_cast<int>(blockDim.x) / kWarpLanes;
  for (int at = thread; at < kSums * kWidth; at += static_cast<int>(blockDim.x)) {
    const int which = at / kWidth;
    auto* to = static_cast<W*>(which == 0 ? p.grad_weight : p.grad_bias);
    if (to == nullptr || begin + at % kWidth >= p.columns) continue;
    C sum = 0;
    for (int warp = 0; warp < warps; ++warp) sum += slots[warp][which][at % kWidth];
    to[begin + at % kWidth] = convert<W>(sum);
  }
}

template <class Access, class W, bool kCentered, bool kAdds>
__global__ void __launch_bounds__(kFewThreads, 2)
    few_rows_kernel(NormBackward p, TeamShape shape, int strips) {
  wait_for_previous_kernel();
  const int block = static_cast<int>(blockIdx.x);
  if (block < strips) {  // the column sums begin first, because they take longer
    if (has_short_columns(p)) {
      sums_of_short_columns<Access, W, kCentered>(p, block);
    } else {
      sums_of_columns<Access, W, kCentered>(p, block);
    }
  } else {
    gradients_of_rows<Access, W, kCentered, kAdds>(p, shape, block - strips);
  }
}

}  // namespace

Status launch(const NormBackward& p, const FewRowsPlan& plan, Allocate, CUstream_st* stream) {
  if (plan.row_blocks + plan.strips == 0) return {};
  const Grid grid{dim3(static_cast<unsigned>(plan.row_blocks + plan.strips)),
                  dim3(static_cast<unsigned>(plan.team.block_threads()))};
  const auto launch = [&](auto kernel) {
    return launch_overlapped(kernel, grid, stream, p, plan.team, plan.strips);
  };
  return dispatch_floating(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using Access = RowVectors<T, kVectorLanes<T>, true>;
    return with_parameter_type<T>(p.weight_dtype, [&](auto parameter) {
      using W = typename decltype(parameter)::type;
      const auto with_sum = [&](auto centered) {
        return p.grad_sum == nullptr ? launch(few_rows_kernel<Access, W, centered, false>)
                                     : launch(few_rows_kernel<Access, W, centered, true>);
      };
      return p.centered ? with_sum(std::true_type{}) : with_sum(std::false_type{});
    });
  });
}

}  // namespace torchkiln::cuda::norm_gradients
