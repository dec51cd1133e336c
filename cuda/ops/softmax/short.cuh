#pragma once

// Softmax of short rows and its gradient: several threads of a warp share a row. The code is also
// short, because a small call takes as long as loading its instructions from memory.

#include "strided.cuh"

namespace torchkiln::cuda {
namespace {

constexpr int kSingleLoads = 8;  // in flight per thread
/// Blocks per SM: 64 registers per thread with several rows.
template <class T, int kRows>
constexpr int kShortBlocks = kRows > 1 && sizeof(T) < 8 ? 8 : 1;

/// The result of op over the values of `lanes` adjacent threads.
template <class C, class Op>
__device__ __forceinline__ C reduce_lanes(C value, int lanes, Op op) {
#pragma unroll 1
  for (int offset = lanes / 2; offset > 0; offset /= 2)
    value = op(value, __shfl_xor_sync(~0u, value, offset));
  return value;
}

/// Softmax of a short row. The result overwrites x in registers.
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
    // NaN for infinity and NaN, as in torch. value - value would not do: if the compiler fuses the
    // product, the difference is its rounding error.
    const C value = convert<C>(x) * static_cast<C>(p.scale);
    return convert<T>(isfinite(value) ? C(kLog ? 0 : 1) : C(NAN));
  }

  template <int kItems>
  static __device__ __forceinline__ void row(const Problem& p, T (&x)[kItems], const T (&)[kItems],
                                             const bool (&has)[kItems], int lanes) {
    C z[kItems], largest = C(kExcluded), sum = 0;
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      z[k] = has[k] ? convert<C>(x[k]) * static_cast<C>(p.scale) : C(kExcluded);
      largest = fmax(largest, z[k]);
    }
    largest = reduce_lanes(largest, lanes, [](C a, C b) { return fmax(a, b); });
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      z[k] -= largest;
      const C exponential = Math::exp(z[k]);
      sum += exponential;
      if (!kLog) z[k] = exponential;
    }
    sum = reduce_lanes(sum, lanes, [](C a, C b) { return a + b; });
    const C factor = kLog ? log(sum) : C(1) / sum;
#pragma unroll
    for (int k = 0; k < kItems; ++k) x[k] = convert<T>(kLog ? z[k] - factor : z[k] * factor);
  }
};

/// The gradient of a short row. The gradient of x overwrites the incoming gradient in registers.
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

  template <int kItems>
  static __device__ __forceinline__ void row(const Problem& p, T (&grad)[kItems],
                                             const T (&y)[kItems], const bool (&)[kItems],
                                             int lanes) {
    C total = 0;
#pragma unroll
    for (int k = 0; k < kItems; ++k)
      total += kLog ? convert<C>(grad[k]) : convert<C>(grad[k]) * convert<C>(y[k]);
    total = reduce_lanes(total, lanes, [](C a, C b) { return a + b; });
#pragma unroll
    for (int k = 0; k < kItems; ++k)
      grad[k] = convert<T>(
          of_element(convert<C>(grad[k]), convert<C>(y[k]), total, static_cast<C>(p.scale)));
  }

 private:
  static __device__ __forceinline__ C of_element(C grad, C y, C total, C scale) {
    return gradient<kLog>(grad, y, total, scale, kLog ? MathFor<T>::exp(y) : C(0));
  }
};

/// 2^log_lanes threads of a warp have a row, up to kItems elements each. A thread has elements of
/// kRows rows, whose loads are in flight together.
template <class Row, int kRows, int kItems>
__global__ void __launch_bounds__(kShortThreads, kShortBlocks<typename Row::T, kRows>)
    softmax_short_rows(typename Row::Problem p, int log_lanes) {
  using T = typename Row::T;
  const int64_t begin = int64_t{blockIdx.x} * (kShortThreads * kRows) + threadIdx.x;
  const int lanes = 1 << log_lanes;
  const int first = static_cast<int>(threadIdx.x) & (lanes - 1);
  T elements[kRows][kItems], of_second[kRows][kItems];
  bool has[kRows][kItems];
  wait_for_previous_kernel();
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t row = (begin + r * kShortThreads) >> log_lanes;
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      const int column = first + k * lanes;
      has[r][k] = row < p.outer && column < p.length;
      elements[r][k] = of_second[r][k] = T(0);
      if (!has[r][k]) continue;
      elements[r][k] = Row::first(p)[row * p.outer_stride + column * p.stride];
      if constexpr (Row::kStreams > 1) of_second[r][k] = Row::second(p)[row * p.length + column];
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t row = (begin + r * kShortThreads) >> log_lanes;
    Row::row(p, elements[r], of_second[r], has[r], lanes);
#pragma unroll
    for (int k = 0; k < kItems; ++k)
      if (has[r][k]) Row::result(p)[row * p.length + first + k * lanes] = elements[r][k];
  }
}

/// Computes rows of one element.
template <class Row>
__global__ void __launch_bounds__(kShortThreads) softmax_singles(typename Row::Problem p) {
  using T = typename Row::T;
  constexpr bool kTwo = Row::kStreams > 1;
  const int64_t begin = int64_t{blockIdx.x} * kShortThreads * kSingleLoads + threadIdx.x;
  const T* const first = Row::first(p);
  const T* const second = Row::second(p);
  T* const results = Row::result(p);
  wait_for_previous_kernel();
  T firsts[kSingleLoads], seconds[kSingleLoads];
#pragma unroll
  for (int k = 0; k < kSingleLoads; ++k) {
    const int64_t row = begin + k * kShortThreads;
    if (row >= p.outer) continue;
    firsts[k] = first[row * p.outer_stride];
    if constexpr (kTwo) seconds[k] = second[row];
  }
#pragma unroll
  for (int k = 0; k < kSingleLoads; ++k) {
    const int64_t row = begin + k * kShortThreads;
    if (row < p.outer) results[row] = Row::single(p, firsts[k], seconds[kTwo ? k : 0]);
  }
}

template <class Row>
Status launch_short(const typename Row::Problem& p, const ShortPlan& plan, CUstream_st* stream) {
  if (plan.blocks > kMaxGridX) return {"too many rows for one launch"};
  const Grid grid{dim3(static_cast<unsigned>(plan.blocks)), dim3(kShortThreads)};
  if (p.length == 1) return launch_overlapped(softmax_singles<Row>, grid, stream, p);
  const auto launch = [&](auto kernel) {
    return launch_overlapped(kernel, grid, stream, p, plan.log_lanes);
  };
  if (plan.rows == 1) return launch(softmax_short_rows<Row, 1, kShortItems>);
  if constexpr (sizeof(typename Row::T) < 8) {
    if (plan.rows == kFewerShortRows)
      return launch(softmax_short_rows<Row, kFewerShortRows, kMoreShortItems>);
  }
  // Rows of two elements have a kernel with two items per thread: kShortItems would be twice as
  // many.
  return p.length == 2 ? launch(softmax_short_rows<Row, kShortRows, 2>)
                       : launch(softmax_short_rows<Row, kShortRows, kShortItems>);
}

}  // namespace
}  // namespace torchkiln::cuda
