#pragma once

// Tiles of 128 x 128 elements, read once: the rows in E4M3, and the rows of the transposed matrix,
// through shared memory. The blocks that share a scale are 128 elements of a row of each result, or
// the tile.

#include "patch.cuh"

namespace torchkiln::fp8 {
namespace {

inline constexpr int kSide128 = kScaledElements;
inline constexpr int kWarps = kThreads / device::kWarpLanes;

/// The transposed tile, in units of 8 bytes: those of 8 rows of x. Unit u of column c is at
/// u ^ (c / 8), so that lanes, which are 8 columns apart, write to different banks. The 16-byte
/// pairs that are read stay together.
class TransposedTile {
 public:
  __device__ __forceinline__ void put(int column, int unit, const Vec<uint32_t, 2>& bytes) {
    *reinterpret_cast<Vec<uint32_t, 2>*>(&unit_[column * kLanes + (unit ^ column / kSide)]) = bytes;
  }
  /// The bytes of 16 rows, from row 16 * pair on.
  __device__ __forceinline__ uint4 get(int column, int pair) const {
    const int shift = column / kSide;
    const auto* const units = &unit_[column * kLanes + ((2 * pair) ^ (shift & ~1))];
    const uint4 found = *reinterpret_cast<const uint4*>(units);
    return shift % 2 == 0 ? found : uint4{found.z, found.w, found.x, found.y};
  }

 private:
  alignas(16) uint64_t unit_[kSide128 * kLanes];
};

struct Shared {
  TransposedTile tile;
  float by_warp[kWarps][kSide128];  // magnitudes of columns
  float reciprocal[kSide128];       // of the scales of columns
};

/// Stores the scale of a square, and zeros behind the last one of a row of scales.
__device__ __forceinline__ void store_square(float* scale, int64_t stride, int64_t row,
                                             int64_t block, int64_t blocks, float value) {
  scale[row * stride + block] = value;
  if (block + 1 == blocks)
    for (int64_t i = blocks; i < stride; ++i) scale[row * stride + i] = 0;
}

/// The largest magnitude of the tile, in all elements of `rows`.
__device__ __forceinline__ void largest_of_tile(Shared& shared, float (&rows)[kSide]) {
  largest_of_lanes<kLanes>(rows);
  float most = 0;
#pragma unroll
  for (int r = 0; r < kSide; ++r) most = fmaxf(most, rows[r]);
  most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, kLanes));
  const int warp = static_cast<int>(threadIdx.x) / device::kWarpLanes;
  if (threadIdx.x % device::kWarpLanes == 0) shared.by_warp[warp][0] = most;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kWarps; ++w) most = fmaxf(most, shared.by_warp[w][0]);
#pragma unroll
  for (int r = 0; r < kSide; ++r) rows[r] = most;
}

/// Computes the scales of the columns, stores them, and leaves their reciprocals in `shared`.
__device__ __forceinline__ void scale_columns(const Quantize& p, Shared& shared,
                                              float (&columns)[kSide], int64_t first_row,
                                              int64_t first_column) {
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % device::kWarpLanes;
#pragma unroll
  for (int c = 0; c < kSide; ++c) {
    const float both = fmaxf(columns[c], __shfl_xor_sync(kAllLanes, columns[c], kLanes));
    if (lane < kLanes) shared.by_warp[thread / device::kWarpLanes][lane * kSide + c] = both;
  }
  __syncthreads();
  if (thread < kSide128) {
    float most = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) most = fmaxf(most, shared.by_warp[w][thread]);
    const uint32_t exponent = fp8_scale_exponent(__float_as_uint(most));
    shared.reciprocal[thread] = reciprocal_of(exponent);
    if (first_column + thread < p.columns)
      p.transposed_scale[first_row / kSide128 * p.columns + first_column + thread] =
          scale_of(exponent);
  }
  __syncthreads();
}

/// Writes the transposed tile from shared memory.
template <bool aligned>
__device__ __forceinline__ void store_transposed(const Quantize& p, const TransposedTile& tile,
                                                 int64_t first_row, int64_t first_column) {
  constexpr int kBytes = 16;
  constexpr int kPairs = kSide128 / kBytes;
#pragma unroll
  for (int i = 0; i < kSide128 * kPairs / kThreads; ++i) {
    const int vector = static_cast<int>(threadIdx.x) + i * kThreads;
    const int column = vector / kPairs;
    const int64_t row = first_row + vector % kPairs * kBytes;
    if (first_column + column >= p.columns || row >= p.rows) continue;
    const uint4 bytes = tile.get(column, vector % kPairs);
    uint8_t* const to = p.transposed + (first_column + column) * p.rows + row;
    if constexpr (aligned) {
      *reinterpret_cast<uint4*>(to) = bytes;
    } else {
      const uint32_t words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
#pragma unroll
      for (int b = 0; b < kBytes; ++b)
        if (row + b < p.rows) to[b] = static_cast<uint8_t>(words[b / 4] >> b % 4 * 8);
    }
  }
}

/// `square`: the tile has one scale. Else `rows` says whether the rows are wanted, too.
template <class Reader, bool square, bool rows, bool aligned>
__global__ void __launch_bounds__(kThreads, 2) quantize_tile(Quantize p, Reader reader) {
  __shared__ Shared shared;
  device::wait_for_previous_kernel();
  const int64_t blocks = p.column_blocks();
  const int64_t row_block = blockIdx.x / blocks;
  const int64_t block = reader.tile_at(blockIdx.x % blocks, blocks);
  const int group = static_cast<int>(threadIdx.x) / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int64_t first_row = row_block * kSide128, first_column = block * kSide128;
  const int64_t row = first_row + group * kSide, column = first_column + lane * kSide;
  Patch<Reader, kSide> patch;
  patch.template load<aligned>(reader, p, row, column);
  float by_row[kSide], by_column[kSide];
  patch.template magnitudes<!square>(false, by_row, by_column);
  const bool infinite = __syncthreads_or(any_infinite(by_row)) != 0;
  if (infinite) patch.template magnitudes<!square>(true, by_row, by_column);
  patch.drop_converted();
  float square_reciprocal = 0;
  if constexpr (square) {
    largest_of_tile(shared, by_row);
    const uint32_t exponent = fp8_scale_exponent(__float_as_uint(by_row[0]));
    square_reciprocal = reciprocal_of(exponent);
    if (threadIdx.x == 0) {
      store_square(p.scale, p.scale_stride, row_block, block, blocks, scale_of(exponent));
      store_square(p.transposed_scale, p.transposed_scale_stride, block, row_block, p.row_blocks(),
                   scale_of(exponent));
    }
  } else {
    scale_columns(p, shared, by_column, first_row, first_column);
    if constexpr (rows) largest_of_lanes<kLanes>(by_row);
  }
  if constexpr (rows) {
    store_rows<aligned>(p, patch, by_row, infinite, row, column);
    patch.drop_converted();
  }
#pragma unroll
  for (int c = 0; c < kSide; ++c) {
    const float reciprocal = square ? square_reciprocal : shared.reciprocal[lane * kSide + c];
    shared.tile.put(lane * kSide + c, group,
                    pack_all<kSide>(reciprocal, infinite, [&](int r) { return patch.at(r, c); }));
  }
  __syncthreads();
  store_transposed<aligned>(p, shared.tile, first_row, first_column);
}

template <bool square, bool rows, bool aligned, class Reader>
Status launch_tiles_of(const Reader& reader, const Quantize& p, cudaStream_t stream) {
  if (p.tiles() > device::kMaxGridX) return {"x has too many elements"};
  const device::Grid grid{dim3(static_cast<unsigned>(p.tiles())), dim3(kThreads)};
  return device::launch_overlapped(&quantize_tile<Reader, square, rows, aligned>, grid, stream, p,
                                   reader);
}

}  // namespace
}  // namespace torchkiln::fp8
