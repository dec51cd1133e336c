#pragma once

// The transposed pattern of few entries in one launch. The position of an entry is the number of
// entries before it, ordered by column and then by index. A column begins at the number of entries
// in smaller columns.

#include "choose_transpose.h"
#include "detail/sparse/csr_split.cuh"
#include "torchkiln/device/vec.cuh"

namespace torchkiln::cuda {

using namespace device;
using namespace sparse;

template <class Index>
__global__ void __launch_bounds__(kRankThreads) rank_entries(CsrTranspose p, RankPlan plan) {
  constexpr int kKeys = 4;  // read together by a thread
  __shared__ __align__(kVectorBytes) uint32_t keys[kMostRanked];
  wait_for_previous_kernel();
  const int64_t matrix = blockIdx.x / plan.blocks;
  const int block = static_cast<int>(blockIdx.x - matrix * plan.blocks);
  const int entries = static_cast<int>(p.pattern.entries);
  const int columns = static_cast<int>(p.pattern.columns);
  const Index* crow = begins_of<Index>(p.pattern, matrix);
  const Index* col = columns_of<Index>(p.pattern, matrix);
  const int padded = (entries + 4 * kKeys - 1) & -(4 * kKeys);
#pragma unroll 8
  for (int e = static_cast<int>(threadIdx.x); e < padded; e += kRankThreads)
    keys[e] = e < entries ? static_cast<uint32_t>(__ldg(col + e)) << kRankBits | e : ~0u;

  const int targets = kRankThreads >> plan.lanes_log2;
  const bool has_entries = block < plan.entry_blocks;
  const int first = (block - (has_entries ? 0 : static_cast<int>(plan.entry_blocks))) * targets;
  const int target = first + (static_cast<int>(threadIdx.x) >> plan.lanes_log2);
  const bool is_there = has_entries ? target < entries : target <= columns;
  int row = 0;
  if (has_entries) {
    const int of_warp = (kWarpLanes >> plan.lanes_log2) - 1;
    const int last = min(target | of_warp, entries - 1);
    const int rows = static_cast<int>(p.pattern.rows);
    row = row_between(crow, row_of(crow, rows, min(target & ~of_warp, last)),
                      row_of(crow, rows, last), min(target, last));
  }
  __syncthreads();
  const uint32_t key =
      has_entries ? keys[min(target, entries - 1)] : static_cast<uint32_t>(target) << kRankBits;
  const int lanes = 1 << plan.lanes_log2;
  int place = 0;
#pragma unroll 4
  for (int k = (static_cast<int>(threadIdx.x) & (lanes - 1)) * kKeys; k < padded;
       k += lanes * kKeys) {
    const uint4 four = *reinterpret_cast<const uint4*>(keys + k);
    place += (four.x < key) + (four.y < key) + (four.z < key) + (four.w < key);
  }
  for (int lane = 1; lane < lanes; lane *= 2) place += __shfl_xor_sync(~0u, place, lane);
  if (!is_there || (threadIdx.x & (lanes - 1)) != 0) return;
  int32_t* begins = p.out + matrix * plan.packed;
  if (!has_entries) {
    begins[target] = place;
    return;
  }
  int32_t* row_to = begins + columns + 1;
  row_to[place] = row;
  row_to[entries + place] = target;
}

}  // namespace torchkiln::cuda
