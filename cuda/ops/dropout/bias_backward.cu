// grad_x = kept ? grad * scale : 0, and the gradient of the bias, the sum over the rows, in the
// same pass: a body for the column reduction in detail/reduce/columns.cuh.
//
//   plan       kernel                       when
//   vectors    sum_columns, 16-byte loads   all rows are whole 16-byte vectors, or several adjacent
//                                           rows together, if there are many
//   elements   sum_columns, single loads    otherwise
//   one row    elementwise.cu               one long row, whose gradients are equal

#include "choose.h"
#include "detail/reduce/columns.cuh"
#include "mask.cuh"

namespace torchkiln::cuda {

using namespace reduce;
namespace {

/// Column body: one pass over grad writes grad_x and sums the bias gradient.
template <class T, int Lanes>
struct GradientBody {
  using C = Compute<T>;
  static constexpr int kLanes = Lanes;
  static constexpr int kRowsInFlight = dropout_rows_in_flight(Lanes);
  using Item = Vec<T, Lanes>;

  DropoutBackward problem;  // a folded row is several adjacent rows
  C scale;
  int64_t rest_begin;  // the elements after the last folded row
  int64_t rest_length;
  RandomState random;

  __device__ __forceinline__ void begin(int64_t column, bool is_first, C (&sum)[Lanes]) {
    random = problem.dropout.random.resolved();
    if (!is_first || column >= rest_length) return;
    const int64_t first = rest_begin + column;
    const Mask<Lanes> mask(problem.dropout, random, first);
#pragma unroll
    for (int i = 0; i < Lanes; ++i) {
      if (column + i >= rest_length) break;
      const C grad = convert<C>(static_cast<const T*>(problem.grad)[first + i]);
      const C masked = mask.kept(i) ? grad * scale : C(0);
      sum[i] += masked;
      if (problem.grad_x != nullptr)
        static_cast<T*>(problem.grad_x)[first + i] = convert<T>(masked);
    }
  }

  __device__ __forceinline__ Item load(int64_t row, int64_t column) const {
    return load_vector<Lanes>(static_cast<const T*>(problem.grad) + row * problem.grad_row_stride +
                              column * problem.grad_column_stride);
  }

  __device__ __forceinline__ void consume(const Item& item, int64_t row, int64_t column,
                                          C (&sum)[Lanes]) const {
    const int64_t at = row * problem.columns + column;
    const Mask<Lanes> mask(problem.dropout, random, at);
    C masked[Lanes];
#pragma unroll
    for (int i = 0; i < Lanes; ++i) {
      masked[i] = mask.kept(i) ? convert<C>(item.lane[i]) * scale : C(0);
      sum[i] += masked[i];
    }
    if (problem.grad_x != nullptr) store(static_cast<T*>(problem.grad_x) + at, masked);
  }
};

template <class T, int Lanes>
Status launch_gradients(const DropoutBackward& p, const DropoutPlan& plan, Allocate allocate,
                        CUstream_st* stream) {
  DropoutBackward folded = p;
  folded.rows = plan.columns.rows;
  folded.columns = plan.columns.columns;
  if (plan.columns.fold > 1) folded.grad_row_stride = folded.columns;
  const int64_t done = folded.rows * folded.columns;
  const GradientBody<T, Lanes> body{
      folded, static_cast<Compute<T>>(p.dropout.scale), done, p.rows * p.columns - done, {}};
  return columns::launch<kDropoutBlocks>(body, plan.columns, allocate, p.grad_bias, p.bias_dtype,
                                         stream);
}

Status of_one_row(const DropoutBackward& p, CUstream_st* stream) {
  Elementwise<1> arguments{};
  arguments.out[0] = p.grad_x != nullptr ? p.grad_x : p.grad_bias;
  arguments.dtype = arguments.in_dtype[0] = p.dtype;
  arguments.in[0] = p.grad;
  Dimension<1> row{p.columns, {1}, {p.grad_column_stride}};
  (void)make_layout(&row, 1, arguments.layout);  // one dimension always fits
  const Status status = dropout_backward(arguments, p.dropout, stream);
  if (!status.ok() || p.grad_x == nullptr) return status;
  return columns::copy_row(p.grad_bias, p.grad_x, p.columns, p.dtype, stream);
}

}  // namespace

Status bias_dropout_backward(const DropoutBackward& p, Allocate allocate, CUstream_st* stream) {
  if (p.columns == 0) return {};
  const DropoutPlan plan = choose(p, current_device());
  if (plan.one_row) return of_one_row(p, stream);
  return dispatch_floating(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return plan.lanes == 1 ? launch_gradients<T, 1>(p, plan, allocate, stream)
                           : launch_gradients<T, kVectorLanes<T>>(p, plan, allocate, stream);
  });
}

}  // namespace torchkiln::cuda
