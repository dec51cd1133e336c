// Sums, or means, over one dimension of [outer, reduced, inner], accumulated in float32, or in
// float64 for float64, and rounded once.
//
//   plan            kernel                           when
//   rows: packed    a few lanes for each row         many rows of up to 32 vectors
//   rows: staged    a block copies rows to shared    rows of up to 1 KiB with small gaps or none,
//                   memory                           if they are few or not whole vectors
//   rows: warp      a warp for each row              up to 2 KiB; 4 KiB if they fill the GPU
//   rows: block     a block for each row             up to 64 KiB; longer if they fill the GPU
//   rows: parts     a block for each part, and a     longer rows
//                   second kernel
//   columns         sum_columns, in                  the summed dimension has the larger stride
//                   detail/reduce/columns.cuh
//
// In rows, the summed dimension has the smaller stride: detail/reduce/rows.cuh.

#include "choose.h"
#include "detail/reduce/columns.cuh"
#include "detail/reduce/rows.cuh"

namespace torchkiln::cuda {

using namespace device;
using namespace reduce;
namespace {

/// Column body: the sum over r of in[offset(column) + r * row_stride].
template <class T, class Sum, int Lanes>
struct ColumnBody {
  using C = Sum;
  using Item = Vec<T, Lanes>;
  static constexpr int kLanes = Lanes;
  // Only half precision has 8 lanes. A row in flight then takes 4 registers, or 8 once its elements
  // are converted to float32.
  static constexpr int kRowsInFlight = Lanes > 4 ? 4 : 8;

  const T* in;
  Offsets offset;
  int64_t row_stride;
  // The elements after the last group of `fold` rows. rest_length is 0 if rows are not folded.
  int64_t rest_begin;
  int64_t rest_length;
  int64_t row_length;

  __device__ __forceinline__ void begin(int64_t column, bool is_first, C (&sum)[Lanes]) {
    in += offset(column);
    if (!is_first || rest_length == 0) return;
    const int64_t here = rest_length - column % row_length;
#pragma unroll
    for (int i = 0; i < Lanes; ++i) {
      if (i < here) sum[i] += rows::widened<C>(in[rest_begin + i]);
    }
  }

  __device__ __forceinline__ Item load(int64_t row, int64_t) const {
    return load_vector<Lanes>(in + row * row_stride);
  }

  __device__ __forceinline__ void consume(const Item& item, int64_t, int64_t,
                                          C (&sum)[Lanes]) const {
#pragma unroll
    for (int i = 0; i < Lanes; ++i) sum[i] += rows::widened<C>(item.lane[i]);
  }
};

template <class T, class C, int Lanes>
Status sum_columns(const Reduction& p, const ReductionPlan& plan, Allocate allocate,
                   cudaStream_t stream) {
  if constexpr (Lanes > 1) {
    if (plan.access.lanes < Lanes) return sum_columns<T, C, Lanes / 2>(p, plan, allocate, stream);
  }
  const int fold = plan.access.fold;
  const int64_t length = p.inner * fold;
  const int64_t remainder = p.reduced % fold;
  const ColumnBody<T, C, Lanes> body{
      static_cast<const T*>(p.in), Offsets(p.outer, length, p.outer_stride, p.inner_stride),
      p.reduced_stride * fold,     (p.reduced - remainder) * p.inner,
      remainder * p.inner,         length};
  return columns::launch<kColumnBlocks>(body, plan.columns, allocate, p.out, p.out_dtype, stream,
                                        p.divisor);
}

template <class T, class C>
Status sum(const Reduction& p, const ReductionPlan& plan, Allocate allocate, cudaStream_t stream) {
  if (!plan.in_rows) return sum_columns<T, C, kVectorLanes<T>>(p, plan, allocate, stream);
  return rows::launch<T, C>(plan.shape, plan.rows, allocate, Result{p.out, p.out_dtype, p.divisor},
                            stream);
}

/// Calls body(part) for parts of a batch that fit in one launch each.
template <class Body>
Status for_each_part(const Reduction& p, const Body& body) {
  const int64_t step = largest_batch(p);
  for (int64_t done = 0; done < p.outer; done += step) {
    Reduction part = p;
    part.outer = std::min(step, p.outer - done);
    part.in = static_cast<const char*>(p.in) +
              done * p.outer_stride * static_cast<int64_t>(size_of(p.dtype));
    part.out =
        static_cast<char*>(p.out) + done * p.inner * static_cast<int64_t>(size_of(p.out_dtype));
    const Status status = body(part);
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace

Status reduce(const Reduction& arguments, Allocate allocate, CUstream_st* stream) {
  const Device& device = current_device();
  return dispatch<float, double, __half, __nv_bfloat16>(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return for_each_part(arguments, [&](const Reduction& part) {
      const ReductionPlan plan = choose(part, device);
      if constexpr (!std::is_same_v<T, double>) {
        if (part.out_dtype != Dtype::float64) return sum<T, float>(part, plan, allocate, stream);
      }
      return sum<T, double>(part, plan, allocate, stream);
    });
  });
}

}  // namespace torchkiln::cuda
