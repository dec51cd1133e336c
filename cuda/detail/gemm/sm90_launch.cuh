#pragma once

// The launch of a product with the roles of sm90_roles.cuh.

#include <algorithm>

#include "detail/gemm/sm90_roles.cuh"

namespace torchkiln::gemm::sm90 {

/// An operand as a matrix for TMA.
struct Operand {
  Major major;
  MapShape shape;
};

inline Operand describe(const Matrices& from, int64_t outer, int64_t depth, int64_t outer_stride,
                        int64_t depth_stride, int64_t batch) {
  // The stride of a dimension of size 1 is arbitrary; prefer to read it as contiguous.
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

inline bool is_adjacent(const Matrices& matrices, int64_t rows, int64_t columns) {
  return matrices.row_stride == 1 || matrices.column_stride == 1 || rows == 1 || columns == 1;
}

/// Whether TMA can read the operands in place.
inline bool fits_copies(const Matmul& p) {
  return size_of(p.dtype) == 2 && p.k > 0 && is_adjacent(p.a, p.m, p.k) &&
         is_adjacent(p.b, p.k, p.n) && fits_tensor_map(describe_a(p).shape, p.dtype) &&
         fits_tensor_map(describe_b(p).shape, p.dtype);
}

/// Sets the parameters that no epilogue changes. `half`: as in Parameters.
template <class T>
Status make_parameters(const Matmul& p, int64_t half, Parameters& parameters) {
  const Operand a = describe_a(p);
  const Operand b = describe_b(p);
  const auto box = [](const Operand& operand) {
    return operand.major == Major::k ? kPanelWidth : kTileDepth;
  };
  Status status = make_tensor_map<T>(parameters.a, a.shape, box(a));
  if (status.ok()) status = make_tensor_map<T>(parameters.b, b.shape, box(b));
  if (!status.ok()) return status;
  const int64_t tile_rows = ceil_div(p.m, kTileRows);
  const int64_t tile_columns = ceil_div(p.n, kTileColumns);
  const int64_t tiles = tile_rows * tile_columns * p.batch;
  if (tiles > INT32_MAX / 2) return {"more tiles than a 32-bit number counts"};
  parameters.bias = p.bias;
  parameters.residual = p.residual;
  parameters.bias_is_float = p.bias_dtype == Dtype::float32;
  parameters.keeps_preactivation = p.preactivation != nullptr;
  parameters.repeats_a = p.a.batch_stride == 0;
  parameters.repeats_b = p.b.batch_stride == 0;
  parameters.activation = p.activation;
  parameters.scale = static_cast<float>(p.scale);
  parameters.m = static_cast<int>(p.m);
  parameters.n = static_cast<int>(p.n);
  parameters.half = static_cast<int>(half);
  parameters.depth_steps = static_cast<int>(ceil_div(p.k, kTileDepth));
  parameters.tile_rows = static_cast<int>(tile_rows);
  parameters.tile_columns = static_cast<int>(tile_columns);
  parameters.tiles = static_cast<int>(tiles);
  return {};
}

/// The grid: blocks that compute tiles until none is left.
template <class T>
Grid grid_of(const Parameters& parameters, int multiprocessors) {
  constexpr int kSharedBytes = sizeof(Shared<T>);
  static_assert(kSharedBytes <= 227 * 1024, "more shared memory than a block can have");
  const int blocks = std::min(parameters.tiles, multiprocessors);
  return {dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 1, kSharedBytes};
}

}  // namespace torchkiln::gemm::sm90
