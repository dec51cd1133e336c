#pragma once

// How matmul_hopper.cu multiplies half precision on compute capability 9.0: the division of work.
//
// A block has a tile of 128 by 256 results at a time, and its three warpgroups have three roles:
//
//   two multipliers  a warpgroup each: multiply 64 by 64 of A with 64 by 256 of B, stage by stage;
//                    64 by 256 sums stay in registers. Then sum * scale + bias goes to shared
//                    memory, rounded
//   producer         one thread: copies panels of A and B into a ring of stages, ahead of them
//   finishers        three warps: apply the activation, add the residual and store
//
//                 k ->                            n ->
//               +-----+-----+--        +------------------------+
//   multiplier  | 64  |     |       k  | B  64 x 256  (a stage) |
//        1, 2   +-----+ ... +--     |  +------------------------+      +------------------------+
//               | 64  |     |       v  | ...                    |  ->  | sums, twice 64 x 256   |
//               +-----+-----+--        +------------------------+      +------------------------+
//                 A 128 x 64
//
// Nobody waits for the whole block: while one tile is finished, the next one is multiplied, and the
// stages of the one after that are fetched. The blocks stay until no tile is left.
//
// Pairs of blocks that share what they copy (a cluster and multicast) were measured, too: no faster
// on an H200, whose second-level cache keeps up with the copies.

#include "detail/gemm/stage_ring.cuh"
#include "detail/gemm/tma.cuh"
#include "detail/gemm/wgmma.cuh"
#include "torchkiln/device/vec.cuh"
#include "torchkiln/device/warp.cuh"
#include "torchkiln/kernels/matmul.h"

namespace torchkiln::gemm::sm90 {
using namespace device;

using wgmma::Major;

inline constexpr int kTileRows = 128;
inline constexpr int kTileColumns = wgmma::kColumns;
inline constexpr int kTileDepth = 64;
inline constexpr int kStages = 3;

inline constexpr int kWarpgroup = 4 * kWarpLanes;
inline constexpr int kMultipliers = kTileRows / wgmma::kRows;
inline constexpr int kFinishers = 3;  // warps
inline constexpr int kThreads = (1 + kMultipliers) * kWarpgroup;
// Of 168 each at the start: 504 for the three warpgroups.
inline constexpr int kOtherRegisters = 104;
inline constexpr int kMultiplierRegisters = 200;

// What is fetched at once: 128 rows of A or columns of B, 64 deep. Where k is not adjacent, it
// takes two boxes.
inline constexpr int kPanelWidth = 128;
inline constexpr int kPanel = kPanelWidth * kTileDepth;
inline constexpr int kBox = kTileDepth * kTileDepth;
inline constexpr int kPanelsOfB = kTileColumns / kPanelWidth;
inline constexpr uint32_t kStageBytes = (1 + kPanelsOfB) * kPanel * 2;

// The sums of a multiplier in shared memory: slices of 64 by 64, of which 16 rows are finished and
// stored at once.
inline constexpr int kSliceColumns = 64;
inline constexpr int kSlice = wgmma::kRows * kSliceColumns;
inline constexpr int kSlices = kTileColumns / kSliceColumns;
inline constexpr int kStripRows = 16;

// Blocks at work together have tiles of a nearly square part of the result, whose rows and
// columns the second-level cache holds.
inline constexpr int kGroupRows = 8;

template <class T>
struct alignas(1024) Shared {
  T a[kStages][kPanel];
  T b[kStages][kPanelsOfB * kPanel];
  T sums[kMultipliers][kSlices][kSlice];  // on the way to the finisher, swizzled
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
  bool repeats_a;  // over the batch
  bool repeats_b;
  Activation activation;
  float scale;
  int m;
  int n;
  int depth_steps;
  int tile_rows;
  int tile_columns;
  int tiles;  // all in all
};

/// Until all threads of this multiplier have come.
__device__ __forceinline__ void meet(int multiplier) {
  asm volatile("bar.sync %0, %1;" ::"r"(1 + multiplier), "n"(kWarpgroup) : "memory");
}

/// Where a block's tile begins.
struct Tile {
  int row;
  int column;
  int batch;
};

__device__ __forceinline__ Tile tile_at(const Parameters& p, int index) {
  const int of_batch = p.tile_rows * p.tile_columns;
  const int batch = index / of_batch;
  index -= batch * of_batch;
  const int of_group = kGroupRows * p.tile_columns;
  const int group = index / of_group;
  index -= group * of_group;
  const int height = min(kGroupRows, p.tile_rows - group * kGroupRows);
  const int column = index / height;
  const int row = group * kGroupRows + (index - column * height);
  return {row * kTileRows, column * kTileColumns, batch};
}

}  // namespace torchkiln::gemm::sm90
