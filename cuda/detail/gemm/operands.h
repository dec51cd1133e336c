#pragma once

// The operands of the matrix products on compute capability 9.0, as TMA reads them, and the
// conditions under which it reads them in place. Includes no header of CUDA.

#include <cstdint>

#include "detail/gemm/panel.h"
#include "torchkiln/device/alignment.h"
#include "torchkiln/kernels/matmul.h"

namespace torchkiln::gemm {
using namespace device;

/// Matrices in memory whose inner dimension is contiguous; strides count elements.
struct MapShape {
  const void* data;
  int64_t inner;
  int64_t outer;
  int64_t batch;
  int64_t outer_stride;
  int64_t batch_stride;
};

/// Whether TMA can access the matrices: 16-byte steps, and 32-bit coordinates.
inline bool fits_tensor_map(const MapShape& shape, Dtype dtype) {
  const auto in_range = [&](int64_t stride) {
    return stride > 0 && stride * static_cast<int64_t>(size_of(dtype)) < (int64_t{1} << 40);
  };
  return rows_in_vectors(shape.data, vector_lanes(dtype),
                         {shape.outer_stride, shape.batch_stride}) &&
         in_range(shape.outer_stride) && in_range(shape.batch_stride) && shape.inner < INT32_MAX &&
         shape.outer < INT32_MAX && shape.batch < INT32_MAX;
}

namespace sm90 {

/// An operand as a matrix that TMA can read.
struct Operand {
  Major major;
  MapShape shape;
};

inline Operand describe(const Matrices& from, int64_t outer, int64_t depth, int64_t outer_stride,
                        int64_t depth_stride, int64_t batch) {
  // The stride of a dimension of size 1 is arbitrary: such an operand counts as contiguous along k
  // if the other stride is not 1.
  const bool k_adjacent = depth_stride == 1 || (depth == 1 && outer_stride != 1);
  const Major major = k_adjacent ? Major::k : Major::outer;
  MapShape shape{from.data,
                 k_adjacent ? depth : outer,
                 k_adjacent ? outer : depth,
                 batch,
                 k_adjacent ? outer_stride : depth_stride,
                 from.batch_stride};
  constexpr int64_t kLanes = 8;  // per 16-byte vector
  if (shape.outer == 1) shape.outer_stride = ceil_div(shape.inner, kLanes) * kLanes;
  if (from.batch_stride == 0) shape.batch = 1;
  if (shape.batch == 1) shape.batch_stride = shape.outer * shape.outer_stride;
  return {major, shape};
}

inline Operand describe_a(const Matmul& p) {
  return describe(p.a, p.m, p.k, p.a.row_stride, p.a.column_stride, p.batch);
}
inline Operand describe_b(const Matmul& p) {
  return describe(p.b, p.n, p.k, p.b.column_stride, p.b.row_stride, p.batch);
}
/// A contiguous result of n columns.
inline MapShape describe_result(const Matmul& p, const void* data) {
  return {data, p.n, p.m, p.batch, p.n, p.m * p.n};
}
/// A contiguous matrix of a convolution.
inline MapShape describe_rows(const void* data, int64_t rows, int64_t columns) {
  return {data, columns, rows, 1, columns, rows * columns};
}

inline bool is_adjacent(const Matrices& matrices, int64_t rows, int64_t columns) {
  return matrices.row_stride == 1 || matrices.column_stride == 1 || rows == 1 || columns == 1;
}

/// Whether TMA can read the operands in place, for every product on compute capability 9.0.
inline bool fits_copies(const Matmul& p) {
  return size_of(p.dtype) == 2 && p.k > 0 && is_adjacent(p.a, p.m, p.k) &&
         is_adjacent(p.b, p.k, p.n) && fits_tensor_map(describe_a(p).shape, p.dtype) &&
         fits_tensor_map(describe_b(p).shape, p.dtype);
}

}  // namespace sm90
}  // namespace torchkiln::gemm
