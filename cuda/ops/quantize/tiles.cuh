#pragma once

// Tiles of 128 x 128 elements, read once. Two results, the matrix and the transposed matrix in
// E4M3; the latter goes through shared memory. The elements that share a scale are 128 elements of
// a row of each result, or the whole tile.

#include <cuda_pipeline_primitives.h>

#include "patch.cuh"

namespace torchkiln::fp8 {
namespace {

inline constexpr int kSide128 = kScaledElements;
inline constexpr int kWarps = kThreads / device::kWarpLanes;

/// The transposed tile, in units of 8 bytes. A unit has the elements of a column in 8 rows of x.
/// Unit u of column c is stored at u ^ (c / 8), so that lanes, which are 8 columns apart, write to
/// different banks. Pairs of units, which are read as 16 bytes, remain adjacent.
class TransposedTile {
 public:
  /// Stores a unit of column c of a lane's 8 columns.
  __device__ __forceinline__ void put(unsigned lane, int c, unsigned unit,
                                      const Vec<uint32_t, 2>& bytes) {
    auto* const units = &unit_[lane * kSide * kLanes + (unit ^ lane)];
    *reinterpret_cast<Vec<uint32_t, 2>*>(units + c * kLanes) = bytes;
  }
  /// The bytes of 16 rows of a column, from row 16 * pair on.
  __device__ __forceinline__ uint4 get(unsigned column, unsigned pair) const {
    const unsigned shift = column / kSide;
    const auto* const units = &unit_[column * kLanes + ((2 * pair) ^ (shift & ~1u))];
    const uint4 found = *reinterpret_cast<const uint4*>(units);
    return shift % 2 == 0 ? found : uint4{found.z, found.w, found.x, found.y};
  }

 private:
  alignas(16) uint64_t unit_[kSide128 * kLanes];
};

/// Memory of a tile. If a reader has several results, each thread keeps its rows of them here, in
/// the memory of the transposed tile, until they are quantised. This is safe because a thread reads
/// only rows that it wrote, before the first barrier of store_tile().
template <class T, int kResults>
struct Slot {
  Vec<T, kSide> row[kSide][kThreads];

  __device__ __forceinline__ TransposedTile& tile() {
    return reinterpret_cast<TransposedTile&>(row);
  }
};
template <class T>
struct Slot<T, 1> {
  TransposedTile only;

  __device__ __forceinline__ TransposedTile& tile() { return only; }
};

/// Shared memory of a block.
template <class T, int kResults>
struct Shared {
  Slot<T, kResults> slot[kResults];
  Vec<T, kSide> by_warp[kWarps][kLanes];  // largest magnitudes of columns
  Factor<T> factor[kSide128];             // of each column
};

/// Stores the scale of a square. After the last scale of a row, stores zeros up to the stride.
__device__ __forceinline__ void store_square(float* scale, int64_t stride, int64_t row,
                                             int64_t block, int64_t blocks, float value) {
  scale[row * stride + block] = value;
  if (block + 1 == blocks)
    for (int64_t i = blocks; i < stride; ++i) scale[row * stride + i] = 0;
}

/// The largest magnitude of the tile.
template <class T, class Shared>
__device__ __forceinline__ float largest_of_tile(Shared& shared, const Vec<T, kSide>& rows) {
  Vec<T, 2> most = largest_of_both(rows, rows);
  largest_of_lanes(most, 1, device::kWarpLanes);
  const unsigned warp = threadIdx.x / device::kWarpLanes;
  if (threadIdx.x % device::kWarpLanes == 0) shared.by_warp[warp][0].lane[0] = most.lane[0];
  __syncthreads();
  float all = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) all = fmaxf(all, widen(shared.by_warp[w][0].lane[0]));
  return all;
}

/// Computes the scales of the columns, stores them, and returns the factors of this lane's columns.
template <class T, class Shared>
__device__ __forceinline__ Vec<Factor<T>, kSide> scale_columns(const Quantize& p, Shared& shared,
                                                               Vec<T, kSide>& columns,
                                                               int64_t row_block,
                                                               int64_t first_column) {
  const unsigned thread = threadIdx.x;
  const unsigned lane = thread % device::kWarpLanes;
  largest_of_lanes(columns, kLanes, device::kWarpLanes);
  if (lane < kLanes) shared.by_warp[thread / device::kWarpLanes][lane] = columns;
  __syncthreads();
  if (thread < kSide128) {
    float most = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w)
      most = fmaxf(most, widen(shared.by_warp[w][thread / kSide].lane[thread % kSide]));
    const uint32_t exponent = exponent_for(most);
    shared.factor[thread] = twice<T>(factor_word<T>(exponent)).lane[0];
    if (first_column + thread < p.columns)
      p.transposed_scale[row_block * p.columns + first_column + thread] = scale_of(exponent);
  }
  __syncthreads();
  return reinterpret_cast<const Vec<Factor<T>, kSide>*>(shared.factor)[lane % kLanes];
}

/// Writes the transposed tile from shared memory to the result.
template <bool aligned>
__device__ __forceinline__ void store_transposed(const Quantize& p, const TransposedTile& tile,
                                                 int64_t first_row, int64_t first_column) {
  constexpr unsigned kBytes = 16;
  constexpr unsigned kPairs = kSide128 / kBytes;
  constexpr int kColumns = kThreads / static_cast<int>(kPairs);  // per step
  constexpr int kSteps = kSide128 / kColumns;
  const unsigned pair = threadIdx.x % kPairs, column = threadIdx.x / kPairs;
  const int64_t row = first_row + pair * kBytes;
  const int64_t left = row < p.rows ? p.columns - first_column - column : 0;
  uint8_t* to = p.transposed + (first_column + column) * p.rows + row;
  uint4 bytes[kSteps];
#pragma unroll
  for (int i = 0; i < kSteps; ++i) bytes[i] = tile.get(column + i * kColumns, pair);
#pragma unroll
  for (int i = 0; i < kSteps; ++i, to += kColumns * p.rows) {
    if (i * kColumns >= left) continue;
    if constexpr (aligned) {
      *reinterpret_cast<uint4*>(to) = bytes[i];
    } else {
      const uint32_t words[4] = {bytes[i].x, bytes[i].y, bytes[i].z, bytes[i].w};
#pragma unroll
      for (unsigned b = 0; b < kBytes; ++b)
        if (row + b < p.rows) to[b] = static_cast<uint8_t>(words[b / 4] >> b % 4 * 8);
    }
  }
}

/// The elements that share a scale in a tile. rows: 128 elements of a row; squares: the whole tile;
/// turned_squares: rows in the matrix, the tile in the transposed matrix.
enum class Scales { rows, turned_squares, squares };

/// Stores a tile, which the threads of the block hold as patches. `rows`: whether the matrix is
/// also stored in its own orientation.
template <Scales scales, bool rows, bool aligned, class T, class Shared>
__device__ __forceinline__ void store_tile(const Quantize& p, Shared& shared, TransposedTile& tile,
                                           Patch<T, kSide>& patch, int64_t row_block, int64_t block,
                                           int inside) {
  const unsigned group = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const int64_t first_row = row_block * kSide128, first_column = block * kSide128;
  const int64_t row = first_row + group * kSide, column = first_column + lane * kSide;
  auto most = patch.measure();
  Vec<Factor<T>, kSide> factors;
  uint32_t exponent;
  if constexpr (scales == Scales::rows) {
    factors = scale_columns<T>(p, shared, most.column, row_block, first_column);
  } else {
    exponent = exponent_for(largest_of_tile<T>(shared, most.row));
#pragma unroll
    for (int i = 0; i < kSide / 2; ++i)
      reinterpret_cast<Vec<Factor<T>, 2>*>(&factors)[i] = twice<T>(factor_word<T>(exponent));
    if (threadIdx.x == 0) {
      const float scale = scale_of(exponent);
      store_square(p.transposed_scale, p.transposed_scale_stride, block, row_block, p.row_blocks(),
                   scale);
      if constexpr (scales == Scales::squares)
        store_square(p.scale, p.scale_stride, row_block, block, p.column_blocks(), scale);
    }
  }
  if constexpr (rows && scales != Scales::squares)
    exponent = exponent_for(largest_of_row<kLanes / 2>(most.row));
  if constexpr (rows) store_rows<aligned>(p, patch, exponent, row, column, inside);
#pragma unroll
  for (int pair = 0; pair < kSide / 2; ++pair) {
    Vec<uint32_t, 2> bytes[2];
#pragma unroll
    for (int r = 0; r < kSide; r += 4) {
      float2 value[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        value[i] = scaled(patch.two(r + i, pair),
                          reinterpret_cast<const Vec<Factor<T>, 2>*>(&factors)[pair]);
      bytes[0].lane[r / 4] = pack(float2{value[0].x, value[1].x}, float2{value[2].x, value[3].x});
      bytes[1].lane[r / 4] = pack(float2{value[0].y, value[1].y}, float2{value[2].y, value[3].y});
    }
    tile.put(lane, 2 * pair, group, bytes[0]);
    tile.put(lane, 2 * pair + 1, group, bytes[1]);
  }
  __syncthreads();
  store_transposed<aligned>(p, tile, first_row, first_column);
}

/// Computes a patch of each result. First requests all operands: one of them goes to registers, the
/// others to the memory of the results. Then computes in a loop that is not unrolled, because
/// otherwise the compiler evaluates so many elements at once that it spills.
template <class Reader, class T, int kResults>
__device__ __forceinline__ void compute_results(const Reader& reader,
                                                Slot<T, kResults> (&slot)[kResults], int64_t row,
                                                int64_t column, int rows_inside) {
  constexpr int kStep = kSide / 2;
  const bool inside = rows_inside != 0;  // either all kSide rows are, or none
  if (!inside) row = 0;
  Words<T> held[kSide];
#pragma unroll
  for (int r = 0; r < kSide; ++r) {
#pragma unroll
    for (int k = 0; k < kResults; ++k)
      reader.copy(k, row, r, column, inside, slot[k].row[r][threadIdx.x]);
    held[r] = reader.load(row, r, column, inside);
    if (r % kStep == kStep - 1) __pipeline_commit();
  }
#pragma unroll 1
  for (int first = 0; first < kSide; first += kStep) {
    if (first == 0) {
      __pipeline_wait_prior(1);
    } else {
      __pipeline_wait_prior(0);
    }
#pragma unroll
    for (int i = 0; i < kStep; ++i) {
      Vec<T, kSide> results[kResults];
#pragma unroll
      for (int k = 0; k < kResults; ++k) results[k] = slot[k].row[first + i][threadIdx.x];
      reader.finish(held[i].vector(), results);
#pragma unroll
      for (int k = 0; k < kResults; ++k) slot[k].row[first + i][threadIdx.x] = results[k];
      held[i] = held[i + kStep];
    }
  }
}

/// Quantises a tile. If the reader has two results, a block quantises a tile of each; the two are
/// half of the columns apart. `blocks` divides by the number of tiles in a row of one result.
template <class Reader, Scales scales, bool rows, bool aligned>
__global__ void __launch_bounds__(kThreads, Reader::kBlocksPerSm)
    quantize_tile(Quantize p, Reader reader, device::Divisor blocks) {
  using T = typename Reader::T;
  constexpr int kResults = Reader::kResults;
  extern __shared__ uint4 memory[];
  auto& shared = *reinterpret_cast<Shared<T, kResults>*>(memory);
  device::wait_for_previous_kernel();
  const uint32_t row_block = blocks.quotient(blockIdx.x);
  const uint32_t block = blockIdx.x - row_block * blocks.divisor();
  const int64_t row = int64_t{row_block} * kSide128 + threadIdx.x / kLanes * kSide;
  const int64_t column = int64_t{block} * kSide128 + threadIdx.x % kLanes * kSide;
  const int inside = rows_inside<kSide>(p, row, column);
  Patch<T, kSide> patch;
  if constexpr (kResults == 1) {
    patch.template load<aligned>(reader, p, row, column, inside);
    store_tile<scales, rows, aligned>(p, shared, shared.slot[0].tile(), patch, row_block, block,
                                      inside);
  } else {
    compute_results(reader, shared.slot, row, column, inside);
#pragma unroll 1
    for (int k = 0; k < kResults; ++k) {
#pragma unroll
      for (int r = 0; r < kSide; ++r) patch.row[r] = shared.slot[k].row[r][threadIdx.x];
      store_tile<scales, rows, aligned>(p, shared, shared.slot[k].tile(), patch, row_block,
                                        block + int64_t{k} * blocks.divisor(), inside);
    }
  }
}

/// The shared memory of a block.
template <class Reader>
inline constexpr int kTileBytes =
    static_cast<int>(sizeof(Shared<typename Reader::T, Reader::kResults>));

template <Scales scales, bool rows, bool aligned, class Reader>
Status launch_tiles_of(const Reader& reader, const Quantize& p, cudaStream_t stream) {
  if (p.tiles() > device::kMaxGridX) return {"x has too many elements"};
  const int64_t blocks = p.column_blocks() / Reader::kResults;
  const device::Grid grid{dim3(static_cast<unsigned>(p.row_blocks() * blocks)), dim3(kThreads), 1,
                          kTileBytes<Reader>};
  return device::launch_overlapped(&quantize_tile<Reader, scales, rows, aligned>, grid, stream, p,
                                   reader, device::Divisor(static_cast<uint32_t>(blocks)));
}

}  // namespace
}  // namespace torchkiln::fp8
