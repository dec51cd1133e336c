#pragma once

// Softmax of rows whose elements are not adjacent.

#include <climits>

#include "choose.h"
#include "detail/rowwise/team.cuh"
#include "torchkiln/core/scalar_math.h"
#include "torchkiln/device/vec.cuh"

namespace torchkiln::cuda {
namespace {

constexpr float kExcluded = -INFINITY;  // an element that a mask excludes

/// The mask of one row.
class MaskRow {
 public:
  __device__ __forceinline__ MaskRow(const RowMask& mask, int64_t row) : data_(mask.data) {
    last_ = mask.causal ? static_cast<int>(row % mask.queries) : INT_MAX;
    if (data_ == nullptr) return;
    stride_ = static_cast<int>(mask.stride);
    int64_t left = row;
    for (int d = 0; d < mask.rows.rank; ++d) {
      const int64_t outer = left / mask.rows.size[d];
      data_ += (left - outer * mask.rows.size[d]) * mask.rows.stride[0][d];
      left = outer;
    }
  }

  __device__ __forceinline__ bool allows(int column) const {
    return column <= last_ && (data_ == nullptr || data_[int64_t{column} * stride_]);
  }

 private:
  const bool* data_;
  int stride_ = 0;
  int last_;
};

/// The gradient of one element.
template <bool kLog, class C>
__device__ __forceinline__ C gradient(C grad, C y, C total, C scale, C exp_of_y) {
  return kLog ? (grad - exp_of_y * total) * scale : (grad - total) * y * scale;
}

/// Reduces over threadIdx.y, in float64 because a thread may add a million numbers.
class ColumnReducer {
 public:
  __device__ __forceinline__ explicit ColumnReducer(
      double (&shared)[kMaxStridedDepth][kStridedColumns])
      : shared_(shared) {}

  /// Returns the result of its column to every thread.
  template <class Op>
  __device__ __forceinline__ double reduce(double value, Op op) {
    __syncthreads();
    shared_[threadIdx.y][threadIdx.x] = value;
    __syncthreads();
    double result = shared_[0][threadIdx.x];
    for (unsigned y = 1; y < blockDim.y; ++y) result = op(result, shared_[y][threadIdx.x]);
    return result;
  }

 private:
  double (&shared_)[kMaxStridedDepth][kStridedColumns];
};

template <class T, bool kLog>
__global__ void __launch_bounds__(kStridedColumns* kMaxStridedDepth) softmax_columns(Softmax p) {
  using C = Compute<T>;
  using Math = MathFor<T>;
  __shared__ double shared[kMaxStridedDepth][kStridedColumns];
  ColumnReducer columns(shared);
  wait_for_previous_kernel();
  const int64_t row = int64_t{blockIdx.x} * kStridedColumns + threadIdx.x;
  const bool inside = row < p.outer * p.inner;
  const int64_t outer = inside ? row / p.inner : 0;
  const int64_t inner = inside ? row - outer * p.inner : 0;
  const int64_t length = inside ? p.length : 0;
  const T* x = static_cast<const T*>(p.x) + outer * p.outer_stride + inner * p.inner_stride;
  T* y = static_cast<T*>(p.y) + outer * p.length * p.inner + inner;
  const MaskRow mask(p.mask, p.inner == 1 ? outer : 0);
  const C scale = static_cast<C>(p.scale);
  const auto value = [&](int64_t i) {
    return mask.allows(static_cast<int>(i)) ? convert<C>(x[i * p.stride]) * scale : C(kExcluded);
  };
  C largest = C(kExcluded);
#pragma unroll 4
  for (int64_t i = threadIdx.y; i < length; i += blockDim.y) largest = fmax(largest, value(i));
  largest = static_cast<C>(columns.reduce(largest, Max{}));
  double sum = 0;
#pragma unroll 4
  for (int64_t i = threadIdx.y; i < length; i += blockDim.y) sum += Math::exp(value(i) - largest);
  sum = columns.reduce(sum, Sum{});
  const C factor = static_cast<C>(1 / sum);
  const C log_sum = static_cast<C>(kLog ? log(sum) : 0);
#pragma unroll 4
  for (int64_t i = threadIdx.y; i < length; i += blockDim.y) {
    const C below = value(i) - largest;
    y[i * p.inner] = convert<T>(kLog ? below - log_sum : Math::exp(below) * factor);
  }
}

template <class T, bool kLog>
__global__ void __launch_bounds__(kStridedColumns* kMaxStridedDepth)
    softmax_backward_columns(SoftmaxBackward p) {
  using C = Compute<T>;
  using Math = MathFor<T>;
  __shared__ double shared[kMaxStridedDepth][kStridedColumns];
  ColumnReducer columns(shared);
  wait_for_previous_kernel();
  const int64_t row = int64_t{blockIdx.x} * kStridedColumns + threadIdx.x;
  const bool inside = row < p.outer * p.inner;
  const int64_t outer = inside ? row / p.inner : 0;
  const int64_t inner = inside ? row - outer * p.inner : 0;
  const int64_t length = inside ? p.length : 0;
  const T* grad = static_cast<const T*>(p.grad) + outer * p.outer_stride + inner * p.inner_stride;
  const int64_t begin = outer * p.length * p.inner + inner;
  const T* y = static_cast<const T*>(p.y) + begin;
  T* grad_x = static_cast<T*>(p.grad_x) + begin;
  const MaskRow mask(p.mask, p.inner == 1 ? outer : 0);
  const C scale = static_cast<C>(p.scale);
  double sum = 0;
#pragma unroll 4
  for (int64_t i = threadIdx.y; i < length; i += blockDim.y) {
    const C g = convert<C>(grad[i * p.stride]);
    sum += kLog ? g : g * convert<C>(y[i * p.inner]);
  }
  const C total = static_cast<C>(columns.reduce(sum, Sum{}));
#pragma unroll 4
  for (int64_t i = threadIdx.y; i < length; i += blockDim.y) {
    const C from = convert<C>(y[i * p.inner]);
    const C result = gradient<kLog>(convert<C>(grad[i * p.stride]), from, total, scale,
                                    kLog ? Math::exp(from) : C(0));
    grad_x[i * p.inner] = convert<T>(mask.allows(static_cast<int>(i)) ? result : C(0));
  }
}

}  // namespace
}  // namespace torchkiln::cuda
