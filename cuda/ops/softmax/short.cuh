#pragma once

// Softmax of short rows and its gradient: a thread has a whole row, in a tile of shared memory that
// a block copies in the order of memory. Rows of one element need no tile.

#include "strided.cuh"
#include "torchkiln/device/fast_divide.cuh"

namespace torchkiln::cuda {
namespace {

constexpr int kShortLoads = 8;  // in flight per thread

/// The result of one row replaces x.
template <class T_, bool kLog>
struct ShortSoftmax {
  using Problem = Softmax;
  using T = T_;
  using C = Compute<T>;
  using Math = MathFor<T>;
  static constexpr int kStreams = 1;

  static __device__ __forceinline__ const T* first(const Problem& p) {
    return static_cast<const T*>(p.x);
  }
  static __device__ __forceinline__ const T* second(const Problem&) { return nullptr; }
  static __device__ __forceinline__ T* result(const Problem& p) { return static_cast<T*>(p.y); }

  static __device__ __forceinline__ T single(const Problem& p, T x, T) {
    // NaN for infinity and NaN, as in torch. A difference to itself could be a fused product's
    // rounding error.
    const C value = convert<C>(x) * static_cast<C>(p.scale);
    return convert<T>(isfinite(value) ? C(kLog ? 0 : 1) : C(NAN));
  }

  static __device__ __forceinline__ void row(const Problem& p, T* x, const T*) {
    const int length = static_cast<int>(p.length);
    const C scale = static_cast<C>(p.scale);
    C largest = C(kExcluded);
#pragma unroll 4
    for (int i = 0; i < length; ++i) largest = fmax(largest, convert<C>(x[i]) * scale);
    C sum = 0;
#pragma unroll 4
    for (int i = 0; i < length; ++i) sum += Math::exp(convert<C>(x[i]) * scale - largest);
    const C factor = kLog ? log(sum) : C(1) / sum;
#pragma unroll 4
    for (int i = 0; i < length; ++i) {
      const C below = convert<C>(x[i]) * scale - largest;
      x[i] = convert<T>(kLog ? below - factor : Math::exp(below) * factor);
    }
  }
};

/// The gradient of one row replaces that of the result.
template <class T_, bool kLog>
struct ShortGradient {
  using Problem = SoftmaxBackward;
  using T = T_;
  using C = Compute<T>;
  static constexpr int kStreams = 2;

  static __device__ __forceinline__ const T* first(const Problem& p) {
    return static_cast<const T*>(p.grad);
  }
  static __device__ __forceinline__ const T* second(const Problem& p) {
    return static_cast<const T*>(p.y);
  }
  static __device__ __forceinline__ T* result(const Problem& p) {
    return static_cast<T*>(p.grad_x);
  }

  static __device__ __forceinline__ T single(const Problem& p, T grad, T y) {
    const C g = convert<C>(grad), from = convert<C>(y);
    return convert<T>(of_element(g, from, kLog ? g : g * from, static_cast<C>(p.scale)));
  }

  static __device__ __forceinline__ void row(const Problem& p, T* grad, const T* y) {
    const int length = static_cast<int>(p.length);
    const C scale = static_cast<C>(p.scale);
    C total = 0;
#pragma unroll 4
    for (int i = 0; i < length; ++i)
      total += kLog ? convert<C>(grad[i]) : convert<C>(grad[i]) * convert<C>(y[i]);
#pragma unroll 4
    for (int i = 0; i < length; ++i)
      grad[i] = convert<T>(of_element(convert<C>(grad[i]), convert<C>(y[i]), total, scale));
  }

 private:
  static __device__ __forceinline__ C of_element(C grad, C y, C total, C scale) {
    return gradient<kLog>(grad, y, total, scale, kLog ? MathFor<T>::exp(y) : C(0));
  }
};

/// Copies rows to a tile: adjacent threads read what is closer in memory, elements or rows.
template <class T>
__device__ __forceinline__ void copy_short_rows(const T* from, int64_t outer_stride, int64_t stride,
                                                T* tile, const ShortPlan& plan, int rows,
                                                Divisor length) {
  const auto columns = static_cast<int>(length.divisor());
  const bool across = outer_stride < stride;
  for (int at = static_cast<int>(threadIdx.x); at < columns << plan.log_rows;
       at += kShortLoads * kShortThreads) {
    T items[kShortLoads];
    int places[kShortLoads];
#pragma unroll
    for (int k = 0; k < kShortLoads; ++k) {
      const int i = at + k * kShortThreads;
      const int quotient = static_cast<int>(length.quotient_above_1(static_cast<uint32_t>(i)));
      const int row = across ? i & ((1 << plan.log_rows) - 1) : quotient;
      const int column = across ? i >> plan.log_rows : i - quotient * columns;
      places[k] = row < rows && column < columns ? row * plan.pitch + column : -1;
      if (places[k] >= 0) items[k] = from[row * outer_stride + column * stride];
    }
#pragma unroll
    for (int k = 0; k < kShortLoads; ++k)
      if (places[k] >= 0) tile[places[k]] = items[k];
  }
}

template <class Row>
__global__ void __launch_bounds__(kShortThreads)
    softmax_short_rows(typename Row::Problem p, ShortPlan plan, Divisor length) {
  using T = typename Row::T;
  extern __shared__ uint4 softmax_memory[];
  T* const tile = reinterpret_cast<T*>(softmax_memory);
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t first = int64_t{blockIdx.x} << plan.log_rows;
  const int rows = static_cast<int>(min(int64_t{1} << plan.log_rows, p.outer - first));
  T* const second = tile + (plan.pitch << plan.log_rows);
  wait_for_previous_kernel();
  copy_short_rows(Row::first(p) + first * p.outer_stride, p.outer_stride, p.stride, tile, plan,
                  rows, length);
  if constexpr (Row::kStreams > 1)
    copy_short_rows(Row::second(p) + first * p.length, p.length, 1, second, plan, rows, length);
  __syncthreads();
  for (int row = thread; row < rows; row += kShortThreads)
    Row::row(p, tile + row * plan.pitch, second + row * plan.pitch);
  __syncthreads();
  T* const results = Row::result(p) + first * p.length;
  const int columns = static_cast<int>(length.divisor());
#pragma unroll 4
  for (int at = thread; at < rows * columns; at += kShortThreads) {
    const int row = static_cast<int>(length.quotient_above_1(static_cast<uint32_t>(at)));
    results[at] = tile[row * plan.pitch + at - row * columns];
  }
}

/// Rows of one element.
template <class Row>
__global__ void __launch_bounds__(kShortThreads) softmax_singles(typename Row::Problem p) {
  using T = typename Row::T;
  constexpr bool kTwo = Row::kStreams > 1;
  const int64_t begin = int64_t{blockIdx.x} * kShortThreads * kShortLoads + threadIdx.x;
  const T* const first = Row::first(p);
  const T* const second = Row::second(p);
  T* const results = Row::result(p);
  wait_for_previous_kernel();
  T firsts[kShortLoads], seconds[kShortLoads];
#pragma unroll
  for (int k = 0; k < kShortLoads; ++k) {
    const int64_t row = begin + k * kShortThreads;
    if (row >= p.outer) continue;
    firsts[k] = first[row * p.outer_stride];
    if constexpr (kTwo) seconds[k] = second[row];
  }
#pragma unroll
  for (int k = 0; k < kShortLoads; ++k) {
    const int64_t row = begin + k * kShortThreads;
    if (row < p.outer) results[row] = Row::single(p, firsts[k], seconds[kTwo ? k : 0]);
  }
}

template <class Row>
Status launch_short(const typename Row::Problem& p, const ShortPlan& plan, CUstream_st* stream) {
  if (plan.blocks > kMaxGridX) return {"too many rows for one launch"};
  Grid grid{dim3(static_cast<unsigned>(plan.blocks)), dim3(kShortThreads)};
  if (p.length == 1) return launch_overlapped(softmax_singles<Row>, grid, stream, p);
  grid.shared_bytes = plan.bytes;
  return launch_overlapped(softmax_short_rows<Row>, grid, stream, p, plan,
                           Divisor(static_cast<uint32_t>(p.length)));
}

}  // namespace
}  // namespace torchkiln::cuda
