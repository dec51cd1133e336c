#pragma once

#include "torchkiln/core/activations.h"
#include "torchkiln/core/dtype.h"
#include "torchkiln/core/fp8.h"

struct CUstream_st;

namespace torchkiln {

/// Elements along a row that share a scale; in a square also along a column.
inline constexpr int kScaledElements = 128;

/// Writes matrices in E4M3, one byte per element, and scales in float32: x = data * scale. A scale
/// is the smallest power of two that brings the finite elements of its block to at most 448, and 1
/// if these are all 0. NaN and infinities become the byte 0x7f, a NaN.
///
/// x is [rows, columns] in float32, float16 or bfloat16 or, if x_scale is not null, itself E4M3
/// with a scale for each 128 elements of a row.
struct Quantize {
  const void* x;
  const float* x_scale;  // [blocks of a row, rows]; null: x has the dtype `dtype`
  Dtype dtype;
  int64_t rows;
  int64_t columns;
  int64_t stride;  // elements from one row of x to the next

  uint8_t* data;  // [rows, columns]; null: not wanted
  float* scale;   // [blocks of a row, rows], or [blocks of rows, scale_stride] for squares
  int64_t scale_stride;
  bool square;  // one scale for 128 x 128 elements of data, else for 128 elements of a row

  uint8_t* transposed;      // [columns, rows]; null: not wanted
  float* transposed_scale;  // scales of the transposed matrix, as `scale`
  int64_t transposed_scale_stride;
  bool transposed_square;  // always, if `square`

  TORCHKILN_FP8_INLINE int64_t row_blocks() const {
    return (rows + kScaledElements - 1) / kScaledElements;
  }
  TORCHKILN_FP8_INLINE int64_t column_blocks() const {
    return (columns + kScaledElements - 1) / kScaledElements;
  }
  /// The number of tiles of 128 x 128 elements.
  TORCHKILN_FP8_INLINE int64_t tiles() const { return row_blocks() * column_blocks(); }
};

/// Writes activation(gate) * up in E4M3 or, if grad is not null, the gradients of gate and up side
/// by side: [rows, 2 columns]. Values are first rounded to the dtype.
struct QuantizeGated {
  const void* grad;  // [rows, columns], columns adjacent, as gate and up
  const void* gate;
  const void* up;
  int64_t grad_stride;  // elements from one row to the next
  int64_t gate_stride;
  int64_t up_stride;
  Activation activation;  // one of Gates
  Quantize result;  // rows and columns of the result, dtype of gate; x and stride are not read
};

/// Writes data * scale in float32, for scales of rows or of squares. The product is exact: a scale
/// is a power of two.
struct Dequantize {
  const uint8_t* data;  // [rows, columns]
  const float* scale;   // [rows, blocks of a row], or [blocks of rows, blocks of a row] for squares
  float* out;           // [rows, columns]
  int64_t columns;
  int64_t scale_stride;  // elements from one row of scales to the next
  int64_t block_stride;  // elements from the scale of a block to that of the next block of the row
  bool square;
};

namespace cpu {

/// Computes the tiles begin <= tile < end, numbered along the columns first.
TORCHKILN_EXPORT Status quantize(const Quantize& arguments, int64_t begin, int64_t end);

/// Computes the rows begin <= row < end.
TORCHKILN_EXPORT Status dequantize(const Dequantize& arguments, int64_t begin, int64_t end);

}  // namespace cpu

namespace cuda {

/// Runs on the current device, queued on `stream`.
TORCHKILN_EXPORT Status quantize(const Quantize& arguments, CUstream_st* stream);

/// Whether quantize_gated() supports these tensors: rows of whole 16-byte vectors and, for
/// gradients, half precision, a multiple of 16 rows, whole blocks of 128 columns of gate, and a GPU
/// with enough shared memory.
TORCHKILN_EXPORT bool takes(const QuantizeGated& arguments);

/// Runs on the current device, queued on `stream`.
TORCHKILN_EXPORT Status quantize_gated(const QuantizeGated& arguments, CUstream_st* stream);

/// Whether the current device, which must have compute capability 9.0, can run torch's product of
/// matrices with these scales.
TORCHKILN_EXPORT bool has_block_products();

}  // namespace cuda
}  // namespace torchkiln
