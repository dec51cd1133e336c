#pragma once

// Checks and dispatch on the host, and loads of rows of dense matrices, for all sparse kernels.

#include "detail/sparse/csr_split.cuh"
#include "torchkiln/device/vec.cuh"

namespace torchkiln::sparse {
using namespace device;

/// Returns null if rows, columns and strides fit the kernels' 32-bit integers, else an error
/// message.
inline const char* too_large(const CsrPattern& pattern, int64_t row_stride) {
  constexpr int64_t kMax = (int64_t{1} << 31) - 1;
  // Margins: a search may step past the last row, and a warp past the last entry.
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

/// Calls body(constant) with `lanes` as a compile-time constant: a power of two from 1 to `most`.
template <int most, class Body>
Status with_lanes(int lanes, const Body& body) {
  if constexpr (most > 1) {
    if (lanes < most) return with_lanes<most / 2>(lanes, body);
  }
  return body(std::integral_constant<int, most>{});
}

/// Calls body(type, index, vector) with the element type, the index type and the number of elements
/// per load.
template <class Body>
Status dispatch_sparse(Dtype dtype, bool wide, int lanes, const Body& body) {
  return dispatch_floating(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto with_index = [&](auto index) {
      return with_lanes<kVectorLanes<T>>(lanes,
                                         [&](auto vector) { return body(tag, index, vector); });
    };
    return wide ? with_index(TypeTag<int64_t>{}) : with_index(TypeTag<int32_t>{});
  });
}

/// load_constant(), but in one access also for vectors of 4 and 8 bytes, which are aligned to their
/// size.
template <int V, class T>
__device__ __forceinline__ Vec<T, V> load_part(const T* from) {
  constexpr size_t kBytes = V * sizeof(T);
  if constexpr (V > 1 && kBytes < kVectorBytes) {
    using Word = std::conditional_t<kBytes == sizeof(uint2), uint2, unsigned>;
    static_assert(kBytes == sizeof(Word), "4 or 8 bytes");
    const Word word = __ldg(reinterpret_cast<const Word*>(from));
    return *reinterpret_cast<const Vec<T, V>*>(&word);
  } else {
    return load_constant<V>(from);
  }
}

/// Loads one vector from each of U rows of `dense`; zeros for row -1, or if not `inside`. All loads
/// are in flight together.
template <int V, int U, class T>
__device__ __forceinline__ void load_rows(const T* dense, int row_stride, const int (&row_index)[U],
                                          Vec<T, V> (&rows)[U], bool inside = true) {
#pragma unroll
  for (int u = 0; u < U; ++u) {
    rows[u] = inside && row_index[u] >= 0 ? load_part<V>(dense + int64_t{row_index[u]} * row_stride)
                                          : Vec<T, V>{};
  }
}

/// load_rows() for elements that are not adjacent; loads the first `count` of V elements. Elements
/// that are spaced by a warp are adjacent for the lanes of that warp.
template <int V, int U, class T>
__device__ __forceinline__ void load_strided(const T* dense, int row_stride, int64_t column_stride,
                                             const int (&row_index)[U], Vec<T, V> (&rows)[U],
                                             int count = V) {
#pragma unroll
  for (int u = 0; u < U; ++u) {
    const T* from = dense + int64_t{row_index[u]} * row_stride;
    rows[u] = Vec<T, V>{};
    if (row_index[u] < 0) continue;
#pragma unroll
    for (int i = 0; i < V; ++i)
      if (i < count) rows[u].lane[i] = __ldg(from + i * column_stride);
  }
}

}  // namespace torchkiln::sparse
