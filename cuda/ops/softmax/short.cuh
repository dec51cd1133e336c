#pragma once

// Softmax of short rows and its gradient: several threads of a warp share a row. The code is also
// short, because a small call takes as long as loading its instructions from memory.

#include "strided.cuh"

namespace torchkiln::cuda {
namespace {

constexpr int kSingleLoads = 8;  // in flight per thread

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

  static __device__ __forceinline__ void row(const Problem& p, T (&x)[kShortItems],
                                             const T (&)[kShortItems],
                                             const bool (&has)[kShortItems], int lanes) {
    C z[kShortItems], largest = C(kExcluded), sum = 0;
#pragma unroll
    for (int k = 0; k < kShortItems; ++k) {
      z[k] = has[k] ? convert<C>(x[k]) * static_cast<C>(p.scale) : C(kExcluded);
      largest = fmax(largest, z[k]);
    }
    largest = reduce_lanes(largest, lanes, [](C a, C b) { return fmax(a, b); });
#pragma unroll
    for (int k = 0; k < kShortItems; ++k) {
      z[k] -= largest;
      const C exponential = Math::exp(z[k]);
      sum += exponential;
      if (!kLog) z[k] = exponential;
    }
    sum = reduce_lanes(sum, lanes, [](C a, C b) { return a + b; });
    const C factor = kLog ? log(sum) : C(1) / sum;
#pragma unroll
    for (int k = 0; k < kShortItems; ++k) x[k] = convert<T>(kLog ? z[k] - factor : z[k] * factor);
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

  static __device__ __forceinline__ void row(const Problem& p, T (&grad)[kShortItems],
                                             const T (&y)[kShortItems], const bool (&)[kShortItems],
                                             int lanes) {
    C total = 0;
#pragma unroll
    for (int k = 0; k < kShortItems; ++k)
      total += kLog ? convert<C>(grad[k]) : convert<C>(grad[k]) * convert<C>(y[k]);
    total = reduce_lanes(total, lanes, [](C a, C b) { return a + b; });
#pragma unroll
    for (int k = 0; k < kShortItems; ++k)
      grad[k] = convert<T>(
          of_element(convert<C>(grad[k]), convert<C>(y[k]), total, static_cast<C>(p.scale)));
  }

 private:
  static __device__ __forceinline__ C of_element(C grad, C y, C total, C scale) {
    return gradient<kLog>(grad, y, total, scale, kLog ? MathFor<T>::exp(y) : C(0));
  }
};

/// Computes short rows. 2^log_lanes threads of a warp share a row, with up to kShortItems elements
/// each.
template <class Row>
__global__ void __launch_bounds__(kShortThreads)
    softmax_short_rows(typename Row::Problem p, int log_lanes) {
  using T = typename Row::T;
  const int64_t thread = int64_t{blockIdx.x} * kShortThreads + threadIdx.x;
  const int64_t row = thread >> log_lanes;
  const int lanes = 1 << log_lanes;
  const int first = static_cast<int>(thread) & (lanes - 1);
  T elements[kShortItems], of_second[kShortItems];
  bool has[kShortItems];
  wait_for_previous_kernel();
#pragma unroll
  for (int k = 0; k < kShortItems; ++k) {
    const int column = first + k * lanes;
    has[k] = row < p.outer && column < p.length;
    elements[k] = of_second[k] = T(0);
    if (!has[k]) continue;
    elements[k] = Row::first(p)[row * p.outer_stride + column * p.stride];
    if constexpr (Row::kStreams > 1) of_second[k] = Row::second(p)[row * p.length + column];
  }
  Row::row(p, elements, of_second, has, lanes);
#pragma unroll
  for (int k = 0; k < kShortItems; ++k)
    if (has[k]) Row::result(p)[row * p.length + first + k * lanes] = elements[k];
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
  return launch_overlapped(softmax_short_rows<Row>, grid, stream, p, plan.log_lanes);
}

}  // namespace
}  // namespace torchkiln::cuda
