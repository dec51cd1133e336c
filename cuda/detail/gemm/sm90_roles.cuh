#pragma once

// The producer and the multipliers, whose code does not depend on the epilogue: produce() and
// multiply().

#include "detail/gemm/sm90_tile.cuh"
#include "torchkiln/device/launch.cuh"

namespace torchkiln::gemm::sm90 {

/// Copies a panel of an operand: kPanelWidth rows of A or columns of B from `outer` on, kTileDepth
/// of k.
template <Major kMajor, class T>
__device__ __forceinline__ void copy_panel(T* to, const CUtensorMap& map, int outer, int depth,
                                           int batch, uint64_t* full) {
  if constexpr (kMajor == Major::k) {
    copy_box(to, map, depth, outer, batch, full);
  } else {
#pragma unroll
    for (int box = 0; box < kPanel / kBox; ++box)
      copy_box(to + box * kBox, map, outer + box * kTileDepth, depth, batch, full);
  }
}

template <class T, Major kMajorA, Major kMajorB>
__device__ __forceinline__ void produce(const Parameters& p, Shared<T>& shared) {
  StageRing<kStages> ring(shared.stages);
  StageCursor<kStages> cursor;
  for (int index = blockIdx.x; index < p.tiles; index += gridDim.x) {
    const Tile tile = tile_at(p, index);
    const int batch_a = p.repeats_a ? 0 : tile.batch;
    const int batch_b = p.repeats_b ? 0 : tile.batch;
    for (int step = 0; step < p.depth_steps; ++step, cursor.advance()) {
      const int depth = step * kTileDepth;
      uint64_t* full = ring.claim(cursor, kStageBytes);
      copy_panel<kMajorA>(shared.a[cursor.stage], p.a, tile.row, depth, batch_a, full);
#pragma unroll
      for (int panel = 0; panel < kPanelsOfB; ++panel) {
        copy_panel<kMajorB>(shared.b[cursor.stage] + panel * kPanel, p.b,
                            tile.column_at(panel * kPanelWidth), depth, batch_b, full);
      }
    }
  }
}

/// The bias of columns 2 t and 2 t + 1 of a tile, for thread t of a warpgroup; 0 if there is none.
template <class T>
__device__ __forceinline__ float2 load_bias(const Parameters& p, const Tile& tile, int thread) {
  float values[2] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int at = tile.column_at(thread * 2) + i;
    if (p.bias == nullptr || at >= p.n) continue;
    values[i] = p.bias_is_float ? static_cast<const float*>(p.bias)[at]
                                : convert<float>(static_cast<const T*>(p.bias)[at]);
  }
  return {values[0], values[1]};
}

/// Writes sum * scale + bias to shared memory, rounded to T.
template <class T>
__device__ __forceinline__ void store_sums(T (&to)[kSlices][kSlice], const float* bias, float scale,
                                           int thread, const float (&sums)[wgmma::kSums]) {
  const int lane = thread % kWarpLanes;
  const int row = thread / kWarpLanes * 16 + lane % 16;
  // Stores four blocks of 8 by 8 sums at a time: upper and lower, left and right.
  constexpr int kColumnsAtOnce = 16;
#pragma unroll
  for (int column = 0; column < kTileColumns; column += kColumnsAtOnce) {
    uint32_t blocks[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 bias_pair =
          *reinterpret_cast<const float2*>(bias + column + i / 2 * 8 + lane % 4 * 2);
      const int sum = column / 2 + i * 2;
      const Vec<T, 2> pair{convert<T>(sums[sum] * scale + bias_pair.x),
                           convert<T>(sums[sum + 1] * scale + bias_pair.y)};
      blocks[i] = *reinterpret_cast<const uint32_t*>(&pair);
    }
    const int chunk = column % kSliceColumns / 8 + lane / 16;
    wgmma::store_blocks(reinterpret_cast<char*>(to[column / kSliceColumns]) + swizzled(row, chunk),
                        blocks);
  }
}

/// Starts the products of a tile for one multiplier: its 64 rows of A with all columns of B.
/// Returns the number of the last stage, whose products are still in flight; all earlier stages are
/// released.
template <class T, Major kMajorA, Major kMajorB>
__device__ __forceinline__ int start_products(StageRing<kStages>& ring,
                                              StageCursor<kStages>& cursor,
                                              const T (&a)[kStages][kPanel],
                                              const T (&b)[kStages][kPanelsOfB * kPanel],
                                              int multiplier, int depth_steps,
                                              float (&sums)[wgmma::kSums]) {
  int last_stage = 0;
  for (int step = 0; step < depth_steps; ++step, cursor.advance()) {
    ring.wait_full(cursor);
    // In both layouts a multiplier's 64 rows of A are one box.
    const uint64_t from_a = wgmma::descriptor<kMajorA>(a[cursor.stage] + multiplier * kBox, 0);
    const uint64_t from_b = wgmma::descriptor<kMajorB>(b[cursor.stage], kBox * sizeof(T));
    wgmma::fence();
#pragma unroll
    for (int i = 0; i < kTileDepth / wgmma::kDepth; ++i) {
      wgmma::multiply<T, kMajorA, kMajorB>(sums, from_a + i * wgmma::kNextStep<kMajorA>,
                                           from_b + i * wgmma::kNextStep<kMajorB>, step + i > 0);
    }
    wgmma::commit();
    // The products of this stage are in flight, the products of the previous stage are done.
    wgmma::wait<1>();
    if (step > 0 && threadIdx.x % kWarpgroup == 0) ring.release(last_stage);
    last_stage = cursor.stage;
  }
  return last_stage;
}

template <class T, Major kMajorA, Major kMajorB>
__device__ __forceinline__ void multiply(const Parameters& p, Shared<T>& shared, int multiplier) {
  StageRing<kStages> ring(shared.stages);
  StageCursor<kStages> cursor;
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  float sums[wgmma::kSums];
  uint32_t parity = 0;
  for (int index = blockIdx.x; index < p.tiles; index += gridDim.x) {
    const Tile tile = tile_at(p, index);
    const float2 bias = load_bias<T>(p, tile, thread);  // in flight during the products
    const int last_stage = start_products<T, kMajorA, kMajorB>(ring, cursor, shared.a, shared.b,
                                                               multiplier, p.depth_steps, sums);
    // Stores the bias while the last products run. This half of the buffer was last read two tiles
    // ago, and every thread has passed a barrier since.
    float* const own_bias = shared.bias[multiplier][parity];
    *reinterpret_cast<float2*>(own_bias + thread * 2) = bias;
    sync_multiplier(multiplier);
    wgmma::wait_all(sums);
    if (thread == 0) ring.release(last_stage);
    wait_for_phase(&shared.sums_empty[multiplier], parity ^ 1);
    store_sums(shared.sums[multiplier], own_bias, p.scale, thread, sums);
    fence_before_copy();
    ::cuda::ptx::mbarrier_arrive(&shared.sums_full[multiplier]);
    parity ^= 1;
  }
}

template <class T>
__device__ __forceinline__ void init_barriers(Shared<T>& shared) {
  for (int multiplier = 0; multiplier < kMultipliers; ++multiplier) {
    ::cuda::ptx::mbarrier_init(&shared.sums_full[multiplier], kWarpgroup);
    ::cuda::ptx::mbarrier_init(&shared.sums_empty[multiplier], kFinishers);
  }
  StageRing<kStages>(shared.stages).init(kMultipliers);
}

/// Runs the role of the calling thread. finish(shared, finisher, lane) is the loop of a finisher
/// warp.
template <class T, Major kMajorA, Major kMajorB, class Finish>
__device__ __forceinline__ void run_roles(const Parameters& p, const Finish& finish) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<T>*>(memory);
  if (threadIdx.x == 0) init_barriers(shared);
  __syncthreads();
  wait_for_previous_kernel();
  const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroup;
  if (warpgroup < kMultipliers) {
    wgmma::increase_registers<kMultiplierRegisters>();
    multiply<T, kMajorA, kMajorB>(p, shared, warpgroup);
  } else {
    wgmma::decrease_registers<kOtherRegisters>();
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
    if (thread >= kWarpLanes) {
      finish(shared, thread / kWarpLanes - 1, thread % kWarpLanes);
    } else if (thread == 0) {
      produce<T, kMajorA, kMajorB>(p, shared);
    }
    __syncwarp();
  }
}

}  // namespace torchkiln::gemm::sm90
