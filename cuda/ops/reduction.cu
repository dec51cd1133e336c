// Sums, or means, over one dimension of [outer, reduced, inner], accumulated in float32 and rounded
// once.
//
//   plan            kernel                           when
//   rows: packed    a few lanes for each row         rows of up to 32 vectors, if many
//   rows: staged    a block copies rows to shared    dense rows of up to 1 KiB that are not whole
//                   memory                           vectors, or few of them
//   rows: warp      a warp for each row              up to 2 KiB; 4 KiB if they fill the GPU
//   rows: block     a block for each row             up to 64 KiB; longer if they fill the GPU
//   rows: parts     a block for each part, and a     longer rows
//                   second kernel
//   columns         sum_columns, in                  the summed dimension has the larger stride
//                   detail/reduce/columns.cuh
//
// Rows have the summed dimension as the one with the smaller stride: detail/reduce/rows.cuh.

#include "torchkiln/kernels/reduction.h"

#include <algorithm>
#include <numeric>

#include "detail/reduce/columns.cuh"
#include "detail/reduce/rows.cuh"
#include "torchkiln/device/alignment.h"

namespace torchkiln::cuda {

using namespace device;
using namespace reduce;
namespace {

// Blocks per SM: a sum needs few registers, so four blocks fit, with 64 KiB or more in flight.
constexpr int kColumnBlocks = 4;

/// Column body: the sum over r of in[offset(column) + r * row_stride].
template <class T, class Sum, int Lanes>
struct ColumnBody {
  using C = Sum;
  using Item = Vec<T, Lanes>;
  static constexpr int kLanes = Lanes;
  static constexpr int kRowsInFlight =
      Lanes > 4 ? 4 : 8;  // a row in flight takes up to Lanes registers

  const T* in;
  Offsets offset;
  int64_t row_stride;
  // The elements after the last group of `fold` rows, if rows are folded; else rest_length is 0.
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

/// Whether the reduced dimension has the smaller stride, so that rows are summed.
bool is_rows(const Reduction& p) { return p.inner == 1 || p.reduced_stride <= p.inner_stride; }

/// How columns are read: in vectors of `lanes` elements, and `fold` rows as one.
struct ColumnAccess {
  int lanes = 1;
  int fold = 1;
};

/// Selects the widest vectors that divide every row of a batch. If these are narrower than 16 bytes
/// and the rows are dense, reads `fold` rows as one whose length 16-byte vectors divide; their sums
/// are folded at the end.
ColumnAccess column_access(const Reduction& p) {
  if (is_rows(p) || p.inner_stride != 1) return {};
  const int64_t widest = vector_lanes(p.dtype);
  const int64_t batch_stride = p.outer == 1 ? 0 : p.outer_stride;
  const int lanes = widest_lanes(p.in, p.dtype, {p.inner, p.reduced_stride, batch_stride});
  const ColumnAccess access{lanes};
  if (lanes == widest || p.reduced_stride != p.inner ||
      !rows_in_vectors(p.in, widest, {batch_stride})) {
    return access;
  }
  // Each folded column costs a partial sum, so there must be many rows per fold. Narrow rows gain
  // more from folding: reading them by single elements wastes most of each memory access.
  constexpr int64_t kNarrow = 32;
  int64_t fold = widest / std::gcd(p.inner, widest);
  if (p.reduced < fold * (p.inner < kNarrow ? 4 : 32)) return access;
  while (p.inner * fold < kNarrow * widest / 2 && p.reduced >= 64 * fold) fold *= 2;
  return {static_cast<int>(widest), static_cast<int>(fold)};
}

columns::Plan column_plan(const Reduction& p, const ColumnAccess& access) {
  const int64_t rows = p.reduced / access.fold;
  const int64_t count = p.outer * p.inner * access.fold;
  columns::Plan plan = columns::make_plan(rows, count, access.lanes, kColumnBlocks);
  plan.fold = access.fold;
  plan.period = p.inner;
  return plan;
}

template <class T, class C, int Lanes>
Status sum_columns(const Reduction& p, const ColumnAccess& access, Allocate allocate,
                   cudaStream_t stream) {
  const int64_t length = p.inner * access.fold;
  const int64_t remainder = p.reduced % access.fold;
  const ColumnBody<T, C, Lanes> body{static_cast<const T*>(p.in),
                                     Offsets(p.outer, length, p.outer_stride, p.inner_stride),
                                     p.reduced_stride * access.fold,
                                     (p.reduced - remainder) * p.inner,
                                     remainder * p.inner,
                                     length};
  return columns::launch<kColumnBlocks>(body, column_plan(p, access), allocate, p.out, p.out_dtype,
                                        stream, p.divisor);
}

template <class T, class C, int Lanes>
Status sum_columns_with_lanes(const Reduction& p, const ColumnAccess& access, Allocate allocate,
                              cudaStream_t stream) {
  if constexpr (Lanes > 1) {
    if (access.lanes < Lanes)
      return sum_columns_with_lanes<T, C, Lanes / 2>(p, access, allocate, stream);
  }
  return sum_columns<T, C, Lanes>(p, access, allocate, stream);
}

rows::Shape row_shape(const Reduction& p) {
  return {p.in,           static_cast<int64_t>(size_of(p.dtype)),
          p.outer,        p.inner,
          p.reduced,      p.outer_stride,
          p.inner_stride, p.reduced_stride};
}

template <class T, class C>
Status sum(const Reduction& p, const ColumnAccess& access, Allocate allocate, cudaStream_t stream) {
  if (is_rows(p)) {
    const rows::Shape shape = row_shape(p);
    return rows::launch<T, C>(shape, rows::make_plan(shape), allocate,
                              Result{p.out, p.out_dtype, p.divisor}, stream);
  }
  return sum_columns_with_lanes<T, C, kVectorLanes<T>>(p, access, allocate, stream);
}

/// Calls body(part, access) for parts of a batch with fewer than 2^31 rows or columns, because the
/// kernels locate them by 32-bit division.
template <class Body>
Status for_each_part(const Reduction& p, const Body& body) {
  constexpr int64_t kMax = (int64_t{1} << 31) - 1;
  const ColumnAccess access = column_access(p);
  const bool is_batch = p.outer > 1 && p.inner > 1;
  const int64_t step = is_batch ? std::max<int64_t>(kMax / (p.inner * access.fold), 1) : p.outer;
  for (int64_t done = 0; done < p.outer; done += step) {
    Reduction part = p;
    part.outer = std::min(step, p.outer - done);
    part.in = static_cast<const char*>(p.in) +
              done * p.outer_stride * static_cast<int64_t>(size_of(p.dtype));
    part.out =
        static_cast<char*>(p.out) + done * p.inner * static_cast<int64_t>(size_of(p.out_dtype));
    const Status status = body(part, part.outer == p.outer ? access : column_access(part));
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace

Status reduce(const Reduction& arguments, Allocate allocate, CUstream_st* stream) {
  return dispatch<float, double, __half, __nv_bfloat16>(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return for_each_part(arguments, [&](const Reduction& part, const ColumnAccess& access) {
      if constexpr (!std::is_same_v<T, double>) {
        if (part.out_dtype != Dtype::float64) return sum<T, float>(part, access, allocate, stream);
      }
      return sum<T, double>(part, access, allocate, stream);
    });
  });
}

}  // namespace torchkiln::cuda
