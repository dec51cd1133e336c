#pragma once

// Common to the sparse kernels: checks and dispatch on the host, and loads of rows of dense
// matrices.

#include "detail/sparse/csr_split.cuh"
#include "torchkiln/device/alignment.h"
#include "torchkiln/device/vec.cuh"

namespace torchkiln::sparse {
using namespace device;

/// Whether rows can be read in 16-byte vectors.
inline bool in_vectors(const DenseRows& rows, int64_t width, Dtype dtype) {
  return rows_in_vectors(rows.data, vector_lanes(dtype),
                         {width, rows.row_stride, rows.batch_stride});
}

/// Returns null if rows, columns and strides fit the kernels' 32-bit integers, else an error
/// message.
inline const char* too_large(const CsrPattern& pattern, int64_t row_stride) {
  constexpr int64_t kMax = (int64_t{1} << 31) - 1;
  // A search may step past the last row, and a warp past the last entry.
  constexpr int64_t kMaxRows = kMax - (int64_t{1} << 27);
  constexpr int64_t kMaxNarrow = kMax - (int64_t{1} << 13);
  if (pattern.rows > kMaxRows || pattern.columns > kMax)
    return "a sparse matrix has more than 2^31 - 2^27 rows or 2^31 columns, expected fewer";
  if (!pattern.wide && pattern.entries > kMaxNarrow)
    return "a sparse matrix has nearly 2^31 entries, expected int64 indices";
  if (pattern.entries / 64 > kMax) return "a sparse matrix has too many entries for one launch";
  if (row_stride > kMax)
    return "the row stride of a dense matrix is more than 2^31 - 1 elements, expected less";
  return nullptr;
}

/// Calls body(type, index, vector) with the element type, the index type and the number of elements
/// per load.
template <class Body>
Status dispatch_sparse(Dtype dtype, bool wide, bool vectors, const Body& body) {
  return dispatch_floating(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto with_index = [&](auto index) {
      return vectors ? body(tag, index, std::integral_constant<int, kVectorLanes<T>>{})
                     : body(tag, index, std::integral_constant<int, 1>{});
    };
    return wide ? with_index(TypeTag<int64_t>{}) : with_index(TypeTag<int32_t>{});
  });
}

/// Loads one vector of each of U rows of `dense`; zeros for row -1. All loads are in flight
/// together.
template <int V, int U, class T>
__device__ __forceinline__ void load_rows(const T* dense, int row_stride, const int (&row_index)[U],
                                          Vec<T, V> (&rows)[U]) {
#pragma unroll
  for (int u = 0; u < U; ++u) {
    rows[u] = row_index[u] >= 0 ? load_constant<V>(dense + int64_t{row_index[u]} * row_stride)
                                : Vec<T, V>{};
  }
}

}  // namespace torchkiln::sparse
