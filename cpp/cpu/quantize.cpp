#include "torchkiln/kernels/quantize.h"

#include <algorithm>

#include "detail/round_fp8.h"
#include "torchkiln/cpu/isa.h"

namespace torchkiln::cpu {
namespace TORCHKILN_ISA {
namespace {

constexpr int64_t kTile = kScaledElements;

/// A tile of x in float32. Rows are kTile elements apart.
struct Tile {
  int64_t row, column;  // position of its first element
  int64_t rows, columns;
  float value[kTile * kTile];

  const float* at(int64_t r) const { return value + r * kTile; }
};

/// The value of an E4M3 byte.
float widen_fp8(uint8_t byte) {
  const uint32_t magnitude = byte & 0x7fu;
  constexpr float kSmallest = 0x1p-9f;
  const float small = static_cast<float>(magnitude) * kSmallest;
  const float found = magnitude < 8 ? small : float_of((magnitude << 20) + (120u << 23));
  const uint32_t nan = magnitude == kFp8Nan ? kInfinity | 1u : 0u;
  return float_of(bits_of(found) | nan | uint32_t{byte & 0x80u} << 24);
}

/// Writes the values of E4M3 bytes that share a scale.
void widen_block(float* to, const uint8_t* from, int64_t count, float scale) {
  for (int64_t i = 0; i < count; ++i) to[i] = widen_fp8(from[i]) * scale;
}

void load(const Quantize& p, Tile& tile) {
  for (int64_t r = 0; r < tile.rows; ++r) {
    const int64_t at = (tile.row + r) * p.stride + tile.column;
    float* const to = tile.value + r * kTile;
    if (p.x_scale != nullptr) {
      const auto* const from = static_cast<const uint8_t*>(p.x) + at;
      widen_block(to, from, tile.columns, p.x_scale[tile.column / kTile * p.rows + tile.row + r]);
    } else {
      const float* const run = read_run(to, p.x, at, 1, tile.columns, p.dtype);
      if (run != to) std::copy_n(run, tile.columns, to);
    }
  }
}

/// Writes the numbers value(r, c) of a tile of `rows` x `columns` elements as E4M3. The tile begins
/// at `row` and `column` of a matrix with `pitch` columns. `exponent` has one scale per row.
template <class Value>
void write_rows(uint8_t* data, int64_t pitch, int64_t row, int64_t column, int64_t rows,
                int64_t columns, const uint32_t* exponent, const Value& value) {
  for (int64_t r = 0; r < rows; ++r) {
    const float reciprocal = float_of(fp8_reciprocal_bits(exponent[r]));
    uint8_t* const to = data + (row + r) * pitch + column;
    for (int64_t c = 0; c < columns; ++c) to[c] = narrow_fp8(value(r, c) * reciprocal);
  }
}

/// Stores the scales of a tile's rows. `block`: index of the tile along the rows.
void write_scales(float* scale, int64_t matrix_rows, int64_t block, int64_t row, int64_t rows,
                  const uint32_t* exponent) {
  for (int64_t r = 0; r < rows; ++r)
    scale[block * matrix_rows + row + r] = float_of(fp8_scale_bits(exponent[r]));
}

/// Stores the scale of a square. After the last scale of a row, stores zeros up to the stride.
void write_square_scale(float* scale, int64_t stride, int64_t row_block, int64_t block,
                        int64_t blocks, uint32_t exponent) {
  float* const row = scale + row_block * stride;
  row[block] = float_of(fp8_scale_bits(exponent));
  if (block + 1 == blocks) std::fill(row + blocks, row + stride, 0.0f);
}

void quantize_tile(const Quantize& p, const Tile& tile) {
  uint32_t by_row[kTile] = {};
  uint32_t by_column[kTile] = {};
  for (int64_t r = 0; r < tile.rows; ++r) {
    const float* const values = tile.at(r);
    uint32_t most = 0;
    for (int64_t c = 0; c < tile.columns; ++c) {
      const uint32_t magnitude = finite_magnitude(values[c]);
      most = std::max(most, magnitude);
      by_column[c] = std::max(by_column[c], magnitude);
    }
    by_row[r] = most;
  }
  const uint32_t most_of_tile = *std::max_element(by_row, by_row + tile.rows);
  if (p.square) std::fill_n(by_row, kTile, most_of_tile);
  if (p.transposed_square) std::fill_n(by_column, kTile, most_of_tile);
  for (int64_t i = 0; i < kTile; ++i) {
    by_row[i] = fp8_scale_exponent(by_row[i]);
    by_column[i] = fp8_scale_exponent(by_column[i]);
  }
  const int64_t row_block = tile.row / kTile, column_block = tile.column / kTile;
  if (p.data != nullptr) {
    write_rows(p.data, p.columns, tile.row, tile.column, tile.rows, tile.columns, by_row,
               [&](int64_t r, int64_t c) { return tile.value[r * kTile + c]; });
    if (p.square) {
      write_square_scale(p.scale, p.scale_stride, row_block, column_block, p.column_blocks(),
                         by_row[0]);
    } else {
      write_scales(p.scale, p.rows, column_block, tile.row, tile.rows, by_row);
    }
  }
  if (p.transposed != nullptr) {
    write_rows(p.transposed, p.rows, tile.column, tile.row, tile.columns, tile.rows, by_column,
               [&](int64_t r, int64_t c) { return tile.value[c * kTile + r]; });
    if (p.transposed_square) {
      write_square_scale(p.transposed_scale, p.transposed_scale_stride, column_block, row_block,
                         p.row_blocks(), by_column[0]);
    } else {
      write_scales(p.transposed_scale, p.columns, row_block, tile.column, tile.columns, by_column);
    }
  }
}

}  // namespace

Status quantize(const Quantize& p, int64_t begin, int64_t end) {
  Tile tile;
  for (int64_t i = begin; i < end; ++i) {
    tile.row = i / p.column_blocks() * kTile;
    tile.column = i % p.column_blocks() * kTile;
    tile.rows = std::min(kTile, p.rows - tile.row);
    tile.columns = std::min(kTile, p.columns - tile.column);
    load(p, tile);
    quantize_tile(p, tile);
  }
  return {};
}

Status dequantize(const Dequantize& p, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const uint8_t* const from = p.data + row * p.columns;
    const float* scale = p.scale + (p.square ? row / kTile : row) * p.scale_stride;
    float* const to = p.out + row * p.columns;
    for (int64_t column = 0; column < p.columns; column += kTile, scale += p.block_stride)
      widen_block(to + column, from + column, std::min(kTile, p.columns - column), *scale);
  }
  return {};
}

}  // namespace TORCHKILN_ISA

TORCHKILN_CPU_ENTRY(dequantize, (const Dequantize& arguments, int64_t begin, int64_t end),
                    (arguments, begin, end))
TORCHKILN_CPU_ENTRY(quantize, (const Quantize& arguments, int64_t begin, int64_t end),
                    (arguments, begin, end))

}  // namespace torchkiln::cpu
