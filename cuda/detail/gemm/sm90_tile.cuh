#pragma once

// Division of work in ops/matmul/sm90*.cu, the products of half precision on compute
// capability 9.0.
//
// A block computes one tile of 128 by 256 results at a time. Its three warpgroups have three roles:
//
//   two multipliers  one warpgroup each: multiply 64 by 64 of A with 64 by 256 of B per stage; the
//                    64 by 256 sums stay in registers. At the end of a tile, sum * scale + bias is
//                    rounded and written to shared memory
//   producer         one thread: copies panels of A and B into a ring of stages, ahead of their use
//   finishers        three warps: apply the activation or the gate, add the residual and store
//
//                 k ->                            n ->
//               +-----+-----+--        +------------------------+
//   multiplier  | 64  |     |       k  | B  64 x 256  (a stage) |
//        1, 2   +-----+ ... +--     |  +------------------------+      +------------------------+
//               | 64  |     |       v  | ...                    |  ->  | sums, twice 64 x 256   |
//               +-----+-----+--        +------------------------+      +------------------------+
//                 A 128 x 64
//
// The roles overlap across tiles: while one tile is finished, the next one is multiplied, and the
// stages of the tile after that are fetched. Blocks are persistent: each computes tiles until none
// is left.
//
// Clusters of two blocks that share their copies by multicast were measured, too: no gain on an
// H200, whose L2 cache keeps up with the copies.

#include "detail/gemm/plans.h"
#include "detail/gemm/stage_ring.cuh"
#include "detail/gemm/tma.cuh"
#include "detail/gemm/wgmma.cuh"
#include "torchkiln/device/vec.cuh"
#include "torchkiln/device/warp.cuh"
#include "torchkiln/kernels/matmul.h"

namespace torchkiln::gemm::sm90 {
using namespace device;

static_assert(kTileColumns == wgmma::kColumns && kTileRows == kMultipliers * wgmma::kRows);
inline constexpr int kFinishers = 3;  // warps
// Registers per thread. A thread starts with 168, and 3 warpgroups x 168 = 2 x 200 + 104.
inline constexpr int kOtherRegisters = 104;
inline constexpr int kMultiplierRegisters = 200;

inline constexpr int kBox = kTileDepth * kTileDepth;

// The sums of a multiplier in shared memory: slices of 64 by 64, finished and stored in strips of
// 16 rows.
inline constexpr int kSliceColumns = 64;
inline constexpr int kSlice = wgmma::kRows * kSliceColumns;
inline constexpr int kSlices = kTileColumns / kSliceColumns;
inline constexpr int kStripRows = 16;

// Rows of tiles per group. Blocks visit tiles group by group, so that the blocks at work cover a
// nearly square part of the result, whose rows of A and columns of B stay in L2.
inline constexpr int kGroupRows = 8;

template <class T>
struct alignas(1024) Shared {
  T a[kStages][kPanel];
  T b[kStages][kPanelsOfB * kPanel];
  T sums[kMultipliers][kSlices][kSlice];  // from multipliers to finishers, swizzled
  float bias[kMultipliers][2][kTileColumns];
  StageBarriers<kStages> stages;
  uint64_t sums_full[kMultipliers];
  uint64_t sums_empty[kMultipliers];
};

struct Parameters {
  CUtensorMap a;
  CUtensorMap b;
  CUtensorMap out;
  CUtensorMap preactivation;
  const void* bias;
  const void* residual;
  bool bias_is_float;
  bool keeps_preactivation;
  bool repeats_a;  // A is the same matrix for the whole batch
  bool repeats_b;
  Activation activation;
  float scale;
  int m;
  int n;
  int half;  // columns of a half of B, if a tile has equal parts of both halves; else 0
  int depth_steps;
  int tile_rows;
  int tile_columns;
  int tiles;  // tiles of all matrices
};

/// Waits for all threads of this multiplier.
__device__ __forceinline__ void sync_multiplier(int multiplier) {
  asm volatile("bar.sync %0, %1;" ::"r"(1 + multiplier), "n"(kWarpgroup) : "memory");
}

/// The position of a block's tile: its first row, the first columns of its two panels of B, and its
/// batch.
struct Tile {
  int row;
  int column;
  int second;
  int batch;

  /// The column in the result of column c of the tile.
  __device__ __forceinline__ int column_at(int c) const {
    return c < kPanelWidth ? column + c : second + c - kPanelWidth;
  }
};

__device__ __forceinline__ Tile tile_at(const Parameters& p, int index) {
  const int tiles_per_batch = p.tile_rows * p.tile_columns;
  const int batch = index / tiles_per_batch;
  index -= batch * tiles_per_batch;
  const int tiles_per_group = kGroupRows * p.tile_columns;
  const int group = index / tiles_per_group;
  index -= group * tiles_per_group;
  const int height = min(kGroupRows, p.tile_rows - group * kGroupRows);
  const int tile_column = index / height;
  const int tile_row = group * kGroupRows + (index - tile_column * height);
  const bool is_whole = p.half == 0;
  const int column = tile_column * (is_whole ? kTileColumns : kPanelWidth);
  return {tile_row * kTileRows, column, column + (is_whole ? kPanelWidth : p.half), batch};
}

}  // namespace torchkiln::gemm::sm90
