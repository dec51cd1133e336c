#pragma once

// What the kernels of sparse matrices share on the host, and their rows of dense matrices.

#include "detail/sparse/csr_split.cuh"
#include "torchkiln/device/vec.cuh"

namespace torchkiln::sparse {
using namespace device;

/// Whether rows can be read in 16-byte vectors.
inline bool in_vectors(const DenseRows& rows, int64_t width, Dtype dtype) {
  const int64_t lanes = kVectorBytes / static_cast<int64_t>(size_of(dtype));
  return width % lanes == 0 && rows.row_stride % lanes == 0 && rows.batch_stride % lanes == 0 &&
         aligned(rows.data, kVectorBytes);
}

/// A null where the kernels' 32-bit numbers of rows, columns and strides do.
inline const char* too_large(const CsrPattern& pattern, int64_t row_stride) {
  constexpr int64_t kMost = (int64_t{1} << 31) - 1;
  // Steps of a search go past the last row, and those of a warp past the last entry.
  constexpr int64_t kMostRows = kMost - (int64_t{1} << 27);
  constexpr int64_t kMostNarrow = kMost - (int64_t{1} << 13);
  if (pattern.rows > kMostRows || pattern.columns > kMost)
    return "a sparse matrix has more than 2^31 - 2^27 rows or 2^31 columns, expected fewer";
  if (!pattern.wide && pattern.entries > kMostNarrow)
    return "a sparse matrix has nearly 2^31 entries, expected int64 indices";
  if (pattern.entries / 64 > kMost) return "a sparse matrix has too many entries for one launch";
  if (row_stride > kMost) return "rows lie more than 2^31 - 1 elements apart, expected less";
  return nullptr;
}

/// Calls body(type, index, vector) with the element type, the type of the indices, and the number
/// of elements of an access.
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

/// U rows at `at`, from `column` on; of a row -1 zeros. All loads are on their way together.
template <int V, int U, class T>
__device__ __forceinline__ void load_rows(const T* dense, int row_stride, const int (&at)[U],
                                          Vec<T, V> (&rows)[U]) {
#pragma unroll
  for (int u = 0; u < U; ++u) {
    rows[u] = at[u] >= 0 ? load_constant<V>(dense + int64_t{at[u]} * row_stride) : Vec<T, V>{};
  }
}

}  // namespace torchkiln::sparse
