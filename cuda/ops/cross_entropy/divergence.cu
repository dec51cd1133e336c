// The divergence of two distributions per row, and its gradient with respect to the logits of one.
// A block processes a row, and a thread every 256th class, so that the loads of a warp are adjacent
// whatever the alignment of the rows. With at most 60 registers, 1,024 threads per SM have 8 loads
// each in flight.

#include "target.cuh"
#include "torchkiln/device/block_reduce.cuh"

namespace torchkiln::cuda {
namespace {

constexpr int kDivergenceThreads = 256;
constexpr int kDivergenceItems = 4;

struct DivergenceMath : ExactMath {
  template <class C>
  static __device__ __forceinline__ C log1p(C x) {
    return ::log1p(x);
  }
};

/// The log-probabilities of a row.
template <class C>
struct LogRow {
  const C* logits;
  C scale, log_sum_exp, correction;

  __device__ __forceinline__ LogRow(const DistributionRows& rows, double scale_, int64_t row)
      : logits(static_cast<const C*>(rows.logits) + row * rows.row_stride),
        scale(static_cast<C>(scale_)),
        log_sum_exp(static_cast<const C*>(rows.log_sum_exp)[row]),
        correction(::log1p(static_cast<const C*>(rows.mass)[row] - C(1))) {}

  __device__ __forceinline__ C of(C logit) const {
    return (rounded_product(logit, scale) - log_sum_exp) + correction;
  }
};

/// Calls body(column, log p, log q) for the classes of this thread. kDivergenceItems classes are
/// loaded before the first of them is used.
template <class C, class Body>
__device__ __forceinline__ void for_each_class(const Divergence& p, int64_t row, const Body& body) {
  const LogRow<C> student(p.student, p.scale, row), teacher(p.teacher, p.scale, row);
  const int classes = static_cast<int>(p.classes);
  constexpr int kStep = kDivergenceThreads * kDivergenceItems;
  for (int begin = static_cast<int>(threadIdx.x); begin < classes; begin += kStep) {
    C z[kDivergenceItems], u[kDivergenceItems];
#pragma unroll
    for (int k = 0; k < kDivergenceItems; ++k) {
      const int column = begin + k * kDivergenceThreads;
      z[k] = column < classes ? student.logits[column] : C(0);
      u[k] = column < classes ? teacher.logits[column] : C(0);
    }
#pragma unroll
    for (int k = 0; k < kDivergenceItems; ++k) {
      const int column = begin + k * kDivergenceThreads;
      if (column < classes) body(column, student.of(z[k]), teacher.of(u[k]));
    }
  }
}

template <class C, DivergenceKind kKind>
__global__ void __launch_bounds__(kDivergenceThreads) divergence_rows(Divergence p) {
  wait_for_previous_kernel();
  const int64_t row = blockIdx.x;
  const C beta = static_cast<C>(p.beta);
  C sums[2] = {};
  for_each_class<C>(p, row, [&](int, C log_p, C log_q) {
    add_divergence<DivergenceMath>(kKind, beta, log_p, log_q, sums[0], sums[1]);
  });
  reduce_block(sums);
  if (threadIdx.x > 0) return;
  static_cast<C*>(p.of_student)[row] = sums[0];
  static_cast<C*>(p.of_teacher)[row] = sums[1];
  static_cast<C*>(p.divergence)[row] = sums[0] + sums[1];
}

template <class C, class T, DivergenceKind kKind>
__global__ void __launch_bounds__(kDivergenceThreads) divergence_gradient_rows(Divergence p) {
  wait_for_previous_kernel();
  const int64_t row = blockIdx.x;
  const C beta = static_cast<C>(p.beta), of_student = static_cast<const C*>(p.of_student)[row];
  C factor = static_cast<C>(p.scale);
  if (p.grad != nullptr) factor *= static_cast<const C*>(p.grad)[row];
  T* const to = static_cast<T*>(p.grad_logits) + row * p.grad_logits_row_stride;
  for_each_class<C>(p, row, [&](int column, C log_p, C log_q) {
    to[column] = convert<T>(
        factor * divergence_slope<DivergenceMath>(kKind, beta, log_p, log_q, of_student));
  });
}

/// Launches a kernel with a block for each row.
template <class Kernel>
Status launch_divergence(Kernel kernel, const Divergence& p, CUstream_st* stream) {
  if (p.classes > kMaxColumns) return {kTooLong};
  if (p.rows > kMaxGridX) return {"too many rows for one launch"};
  const Grid grid{dim3(static_cast<unsigned>(p.rows)), dim3(kDivergenceThreads)};
  return launch_overlapped(kernel, grid, stream, p);
}

}  // namespace

Status divergence(const Divergence& p, CUstream_st* stream) {
  if (p.rows == 0 || p.classes == 0) return {};
  return with_kind(p.kind, [&](auto kind) {
    return p.dtype == Dtype::float64 ? launch_divergence(divergence_rows<double, kind()>, p, stream)
                                     : launch_divergence(divergence_rows<float, kind()>, p, stream);
  });
}

Status divergence_gradient(const Divergence& p, CUstream_st* stream) {
  if (p.rows == 0 || p.classes == 0) return {};
  return with_kind(p.kind, [&](auto kind) {
    return dispatch_floating(p.grad_logits_dtype, [&](auto tag) {
      using T = typename std::decay_t<decltype(tag)>::type;
      return launch_divergence(divergence_gradient_rows<Compute<T>, T, kind()>, p, stream);
    });
  });
}

}  // namespace torchkiln::cuda
