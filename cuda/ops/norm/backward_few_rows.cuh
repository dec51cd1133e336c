#pragma once

// Gradients of norms of rows so few that the cache keeps them: some blocks have rows, others have
// columns of every row and sum over them. What is read twice costs less than partial sums that a
// second kernel would have to wait for.

#include "backward_common.cuh"

namespace torchkiln::cuda {
namespace {

constexpr int kFewThreads = 512;
constexpr int kAcross = 8;  // threads side by side in a row: 128 bytes of it

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

  // The weights are read twice: the registers are wanted for what is on the way.
  const auto read = [&](int k, C(&passed)[kLanes], C(&normal)[kLanes]) {
    C weight[kLanes] = {};
    if (tile.has_any(k)) load_weight<W>(p, tile.access(), tile.column(k), weight);
    widen(grads[k], passed);
    widen(inputs[k], normal);
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      passed[i] *= weight[i];
      normal[i] = (normal[i] - mean) * rstd;
    }
  };
  C sums[kCentered ? 2 : 1] = {};
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    C passed[kLanes], normal[kLanes];
    read(k, passed, normal);
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      sums[0] += passed[i] * normal[i];
      if constexpr (kCentered) sums[1] += passed[i];
    }
  }
  // On the way while the team meets.
  if constexpr (kAdds) tile.load(grad_sum, others);
  team.reduce(sums, Sum{});
  const C share = C(1) / static_cast<C>(p.columns);
  const C slope = -rstd * share * sums[0];
  const C level = kCentered ? -rstd * share * sums[kCentered ? 1 : 0] : C(0);
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    C result[kLanes], normal[kLanes];
    read(k, result, normal);
#pragma unroll
    for (int i = 0; i < kLanes; ++i) result[i] = result[i] * rstd + (normal[i] * slope + level);
    if constexpr (kAdds) {
      C other[kLanes];
      widen(others[k], other);
#pragma unroll
      for (int i = 0; i < kLanes; ++i) result[i] += other[i];
    }
    tile.save(inside, static_cast<T*>(p.grad_x) + row * p.columns, k, result);
  }
}

/// The sums of one strip of columns, kAcross threads wide: each thread takes every so many-th row,
/// then a warp's threads meet, then its warps.
template <class Access, class W, bool kCentered>
__device__ __forceinline__ void sums_of_columns(const NormBackward& p, int strip) {
  using T = typename Access::T;
  using C = Compute<T>;
  constexpr int kLanes = Access::kLanes;
  constexpr int kWidth = kAcross * kLanes;
  constexpr int kSums = kCentered ? 2 : 1;
  __shared__ C slots[kFewThreads / kWarpLanes][kSums][kWidth];
  const int thread = static_cast<int>(threadIdx.x);
  const int begin = strip * kWidth;
  const int column = begin + thread % kAcross * kLanes;
  C sums[kSums][kLanes] = {};
  if (column < p.columns) {
    const T* grad = static_cast<const T*>(p.grad) + column;
    const T* z = static_cast<const T*>(p.z) + column;
    const int step = static_cast<int>(blockDim.x) / kAcross;
#pragma unroll 4
    for (int64_t row = thread / kAcross; row < p.rows; row += step) {
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
  }
#pragma unroll
  for (int which = 0; which < kSums; ++which) {
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
#pragma unroll
      for (int offset = kAcross; offset < kWarpLanes; offset *= 2)
        sums[which][i] += __shfl_xor_sync(~0u, sums[which][i], offset);
      if (thread % kWarpLanes < kAcross)
        slots[thread / kWarpLanes][which][thread % kAcross * kLanes + i] = sums[which][i];
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
  if (block < strips) {  // first, for they take longer
    sums_of_columns<Access, W, kCentered>(p, block);
  } else {
    gradients_of_rows<Access, W, kCentered, kAdds>(p, shape, block - strips);
  }
}

/// Whether rows are few: both tensors stay in the cache, and no thread has many rows to sum.
bool are_few(const NormBackward& p, Alignment alignment) {
  constexpr int64_t kMostRows = 2048;
  constexpr int64_t kMostBytes = 16 << 20;  // of each tensor
  const auto size = static_cast<int64_t>(size_of(p.dtype));
  return alignment == Alignment::vector && p.rows <= kMostRows &&
         p.rows * p.columns * size <= kMostBytes &&
         p.columns * size <= kFewThreads * kItems * kVectorBytes;
}

template <class Access, class W>
Status launch_few_rows(const NormBackward& p, CUstream_st* stream) {
  const auto ceil = [](int64_t a, int64_t b) { return static_cast<int>(ceil_div(a, b)); };
  const int vectors = ceil(p.columns, Access::kLanes);
  const TeamShape team = team_of(ceil(vectors, kItems), kFewThreads, kFewThreads, 1);
  const int row_blocks = p.grad_x == nullptr ? 0 : ceil(p.rows, team.per_block);
  const bool has_sums = p.grad_weight != nullptr || p.grad_bias != nullptr;
  const int strips = has_sums ? ceil(vectors, kAcross) : 0;
  if (row_blocks + strips == 0) return {};
  const Grid grid{dim3(static_cast<unsigned>(row_blocks + strips)),
                  dim3(static_cast<unsigned>(team.block_threads()))};
  const auto start = [&](auto centered) {
    return p.grad_sum == nullptr ? launch_overlapped(few_rows_kernel<Access, W, centered, false>,
                                                     grid, stream, p, team, strips)
                                 : launch_overlapped(few_rows_kernel<Access, W, centered, true>,
                                                     grid, stream, p, team, strips);
  };
  return p.centered ? start(std::true_type{}) : start(std::false_type{});
}

}  // namespace
}  // namespace torchkiln::cuda
