// Gradients of norms with few rows, whose tensors stay in L2:
//
//   blocks 0 ... strips - 1   sum strips of columns over all rows: grad_weight, grad_bias
//   all further blocks        read whole rows: grad_x
//
// Both read grad and z; the second read from L2 costs less than partial sums that a second kernel
// would have to wait for. Rows that are not whole vectors are read element by element.

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

  // Weights are loaded twice instead of kept, because the loads in flight need the registers.
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
  // Loads of grad_sum are in flight during the reduction.
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

/// gradients_of_rows() element by element, for rows that begin or end anywhere. The second read of
/// an element hits L1 or L2.
template <class T, class W, bool kCentered>
__device__ __forceinline__ void gradients_of_elements(const NormBackward& p, const TeamShape& shape,
                                                      int group) {
  using C = Compute<T>;
  __shared__ TeamStorage<C, 2> storage;
  Team<C, 2, true> team(shape, storage);
  const int64_t row = int64_t{group} * shape.per_block + team.index();
  const bool inside = row < p.rows;
  const int columns = inside ? static_cast<int>(p.columns) : 0;
  const T* grad = static_cast<const T*>(p.grad) + row * p.grad_row_stride;
  const T* z = static_cast<const T*>(p.z) + row * p.z_row_stride;
  const T* grad_sum = static_cast<const T*>(p.grad_sum) + row * p.grad_sum_row_stride;
  const W* const weights = static_cast<const W*>(p.weight);
  const C mean = kCentered && inside ? static_cast<const C*>(p.mean)[row] : C(0);
  const C rstd = inside ? static_cast<const C*>(p.rstd)[row] : C(0);

  // Calls body(column, grad, z, weight, grad_sum) for the elements of the thread. The compiler
  // drops loads that body does not use.
  const auto for_own = [&](const auto& body) {
    constexpr int kInFlight = sizeof(T) < 8 ? 4 : 2;
    const int step = team.size();
    for (int first = team.rank(); first < columns; first += kInFlight * step) {
      T g[kInFlight], own[kInFlight], others[kInFlight];
      W factors[kInFlight];
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) {
        const int column = first + k * step;
        const bool has = column < columns;
        g[k] = has ? __ldg(grad + column) : T(0.0f);
        own[k] = has ? __ldg(z + column) : T(0.0f);
        others[k] = has && p.grad_sum != nullptr ? __ldg(grad_sum + column) : T(0.0f);
        factors[k] = has && weights != nullptr ? __ldg(weights + column) : W(1.0f);
      }
      const C offset = weights == nullptr ? C(0) : static_cast<C>(p.weight_offset);
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) {
        if (first + k * step < columns)
          body(first + k * step, convert<C>(g[k]), convert<C>(own[k]),
               convert<C>(factors[k]) + offset, convert<C>(others[k]));
      }
    }
  };
  C sums[kCentered ? 2 : 1] = {};
  for_own([&](int, C g, C own, C weight, C) {
    C of_column[2] = {};  // unused: other blocks sum the columns
    accumulate<kCentered>(g, own, weight, mean, rstd, of_column[0], of_column[1], sums);
  });
  team.reduce(sums, Sum{});
  const C inverse_columns = C(1) / static_cast<C>(p.columns);
  const Projection<C> projection = projection_of<kCentered>(p, mean, rstd, inverse_columns, sums);
  T* const grad_x = static_cast<T*>(p.grad_x) + row * p.columns;
  for_own([&](int column, C g, C own, C weight, C other) {
    C result[1] = {g};
    project<T>(projection, {own}, {weight}, result);
    grad_x[column] = convert<T>(result[0] + other);
  });
}

/// Adds the terms of a thread's columns in kRows rows, `step` apart, to the sums of these columns.
/// All loads are in flight together. A loop that may end after each row would prevent this.
template <int kRows, int kLanes, bool kCentered, class T, class C>
__device__ __forceinline__ void add_terms(const NormBackward& p, int64_t row, int64_t step,
                                          const T* grad, const T* z,
                                          C (&sums)[kCentered ? 2 : 1][kLanes]) {
  Vec<T, kLanes> grads[kRows], zs[kRows];
  C means[kRows] = {}, rstds[kRows] = {};
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t at = row + r * step;
    fill(grads[r], T(0.0f));
    fill(zs[r], T(0.0f));
    if (at >= p.rows) continue;
    grads[r] = load_vector<kLanes>(grad + at * p.grad_row_stride);
    zs[r] = load_vector<kLanes>(z + at * p.z_row_stride);
    if constexpr (kCentered) means[r] = static_cast<const C*>(p.mean)[at];
    rstds[r] = static_cast<const C*>(p.rstd)[at];
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    C g[kLanes], x[kLanes];
    widen(grads[r], g);
    widen(zs[r], x);
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      sums[0][i] += g[i] * ((x[i] - means[r]) * rstds[r]);
      if constexpr (kCentered) sums[1][i] += g[i];
    }
  }
}

/// Rows that add_terms() reads together. More would spill registers.
template <class T, int kLanes>
inline constexpr int kTermRows = kLanes == 1 && sizeof(T) < 8 ? 4 : 2;

/// Sums a strip of columns over up to kRowsOfThread rows. The strip has a column or vector for each
/// thread of the block.
template <class Access, class W, bool kCentered>
__device__ __forceinline__ void sums_of_short_columns(const NormBackward& p, int strip) {
  using T = typename Access::T;
  using C = Compute<T>;
  constexpr int kLanes = Access::kLanes;
  constexpr int kSums = kCentered ? 2 : 1;
  const int64_t column = (int64_t{strip} * blockDim.x + threadIdx.x) * kLanes;
  if (column >= p.columns) return;
  C sums[kSums][kLanes] = {};
  constexpr int kRows = kTermRows<T, kLanes>;
#pragma unroll
  for (int row = 0; row < kRowsOfThread; row += kRows) {
    if (row < p.rows)
      add_terms<kRows, kLanes, kCentered>(p, row, 1, static_cast<const T*>(p.grad) + column,
                                          static_cast<const T*>(p.z) + column, sums);
  }
#pragma unroll
  for (int which = 0; which < kSums; ++which) {
    auto* to = static_cast<W*>(which == 0 ? p.grad_weight : p.grad_bias);
    if (to != nullptr) store(to + column, sums[which]);
  }
}

/// Sums a strip of columns that is `threads` threads wide. Each thread adds every n-th row; then
/// warps reduce the sums of their threads, and the block those of its warps.
template <class Access, class W, bool kCentered>
__device__ __forceinline__ void sums_of_columns(const NormBackward& p, int strip, int threads) {
  using T = typename Access::T;
  using C = Compute<T>;
  constexpr int kLanes = Access::kLanes;
  constexpr int kSums = kCentered ? 2 : 1;
  __shared__ C
      slots[kFewThreads / kWarpLanes][kSums][kLanes == 1 ? kWarpLanes : kStripThreads * kLanes];
  const int thread = static_cast<int>(threadIdx.x);
  const int in_strip = thread & (threads - 1);
  const int width = threads * kLanes;
  const int begin = strip * width;
  const int column = begin + in_strip * kLanes;
  C sums[kSums][kLanes] = {};
  if (column < p.columns) {
    const T* grad = static_cast<const T*>(p.grad) + column;
    const T* z = static_cast<const T*>(p.z) + column;
    const int step = static_cast<int>(blockDim.x) / threads;
    constexpr int kRows = kTermRows<T, kLanes>;
    for (int64_t row = thread / threads; row < p.rows; row += kRows * step)
      add_terms<kRows, kLanes, kCentered>(p, row, step, grad, z, sums);
  }
#pragma unroll
  for (int which = 0; which < kSums; ++which) {
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      for (int offset = threads; offset < kWarpLanes; offset *= 2)
        sums[which][i] += __shfl_xor_sync(~0u, sums[which][i], offset);
      if (thread % kWarpLanes < threads)
        slots[thread / kWarpLanes][which][in_strip * kLanes + i] = sums[which][i];
    }
  }
  __syncthreads();
  const int warps = static_cast<int>(blockDim.x) / kWarpLanes;
  for (int at = thread; at < kSums * width; at += static_cast<int>(blockDim.x)) {
    const int which = at / width;
    auto* to = static_cast<W*>(which == 0 ? p.grad_weight : p.grad_bias);
    if (to == nullptr || begin + at % width >= p.columns) continue;
    C sum = 0;
    for (int warp = 0; warp < warps; ++warp) sum += slots[warp][which][at % width];
    to[begin + at % width] = convert<W>(sum);
  }
}

/// Sums a strip of columns. The blocks of strips have the first indices, because they take longer
/// than the blocks of rows.
template <class Access, class W, bool kCentered>
__device__ __forceinline__ void sums_of_strip(const NormBackward& p, int strip, int threads) {
  if (has_short_columns(p)) {
    sums_of_short_columns<Access, W, kCentered>(p, strip);
  } else {
    sums_of_columns<Access, W, kCentered>(p, strip, threads);
  }
}

template <class Access, class W, bool kCentered, bool kAdds>
__global__ void __launch_bounds__(kFewThreads, 2)
    few_rows_kernel(NormBackward p, TeamShape shape, int strips, int strip_threads) {
  wait_for_previous_kernel();
  const int block = static_cast<int>(blockIdx.x);
  if (block < strips) {
    sums_of_strip<Access, W, kCentered>(p, block, strip_threads);
  } else {
    gradients_of_rows<Access, W, kCentered, kAdds>(p, shape, block - strips);
  }
}

template <class T, class W, bool kCentered>
__global__ void __launch_bounds__(kFewThreads, 2)
    few_elements_kernel(NormBackward p, TeamShape shape, int strips, int strip_threads) {
  wait_for_previous_kernel();
  const int block = static_cast<int>(blockIdx.x);
  if (block < strips) {
    sums_of_strip<RowVectors<T, 1, true>, W, kCentered>(p, block, strip_threads);
  } else {
    gradients_of_elements<T, W, kCentered>(p, shape, block - strips);
  }
}

}  // namespace

Status launch(const NormBackward& p, const FewRowsPlan& plan, Allocate, CUstream_st* stream) {
  if (plan.row_blocks + plan.strips == 0) return {};
  const Grid grid{dim3(static_cast<unsigned>(plan.row_blocks + plan.strips)),
                  dim3(static_cast<unsigned>(plan.team.block_threads()))};
  const auto launch = [&](auto kernel) {
    return launch_overlapped(kernel, grid, stream, p, plan.team, plan.strips, plan.strip_threads);
  };
  return dispatch_floating(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using Access = RowVectors<T, kVectorLanes<T>, true>;
    return with_parameter_type<T>(p.weight_dtype, [&](auto parameter) {
      using W = typename decltype(parameter)::type;
      const auto with_sum = [&](auto centered) {
        if (!plan.in_vectors) return launch(few_elements_kernel<T, W, centered>);
        return p.grad_sum == nullptr ? launch(few_rows_kernel<Access, W, centered, false>)
                                     : launch(few_rows_kernel<Access, W, centered, true>);
      };
      return p.centered ? with_sum(std::true_type{}) : with_sum(std::false_type{});
    });
  });
}

}  // namespace torchkiln::cuda::norm_gradients
