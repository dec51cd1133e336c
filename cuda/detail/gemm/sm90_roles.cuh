#pragma once

// The roles of ops/matmul/sm90.cu: produce(), multiply() and finish().

#include "detail/gemm/sm90_tile.cuh"

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
                            tile.column + panel * kPanelWidth, depth, batch_b, full);
      }
    }
  }
}

/// The bias of columns 2 t and 2 t + 1, for thread t of a warpgroup; 0 if there is none.
template <class T>
__device__ __forceinline__ float2 load_bias(const Parameters& p, int column, int thread) {
  float values[2] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int at = column + thread * 2 + i;
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
  // Four blocks of 8 by 8 at a time: upper and lower, left and right.
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

/// Starts the products of a tile for one multiplier: its 64 rows of A with all columns of B. Those
/// of the last stage, whose number it returns, are still in flight; the stages before are released.
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
    // The products of this stage are in flight, those of the previous stage are done.
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
    const float2 bias = load_bias<T>(p, tile.column, thread);  // used after the products
    const int last_stage = start_products<T, kMajorA, kMajorB>(ring, cursor, shared.a, shared.b,
                                                               multiplier, p.depth_steps, sums);
    // Written while the last products run. All threads have read this half, used two tiles ago,
    // before they passed the barrier of the previous tile.
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

/// The unit of work of a finisher warp: 16 rows of a slice. A lane has 16 bytes of every fourth
/// row.
template <class T>
struct Strip {
  static constexpr int kLanes = kVectorLanes<T>;
  static constexpr int kChunks = kSliceColumns / kLanes;  // per row
  static constexpr int kRowStep = kWarpLanes / kChunks;
  static constexpr int kItems = kStripRows / kRowStep;

  T* data;      // the first row in shared memory; the others follow
  Tile origin;  // row, column and batch of its first element
  int lane;

  __device__ __forceinline__ int row(int i) const { return i * kRowStep + lane / kChunks; }
  __device__ __forceinline__ int column() const { return lane % kChunks * kLanes; }
  __device__ __forceinline__ T* item(int i) const {
    // kStripRows is a multiple of the eight rows of the swizzle.
    return reinterpret_cast<T*>(reinterpret_cast<char*>(data) + swizzled(row(i), lane % kChunks));
  }
};

/// Applies activation and residual in place: sums = activation(sums) + residual.
template <class T>
__device__ __forceinline__ void finish_strip(const Parameters& p, const Strip<T>& strip) {
  constexpr int kLanes = Strip<T>::kLanes;
  constexpr int kItems = Strip<T>::kItems;
  Vec<T, kLanes> residual[kItems] = {};
  if (p.residual != nullptr) {
    const int row = strip.origin.row + strip.row(0);
    const int column = strip.origin.column + strip.column();
    const T* from = static_cast<const T*>(p.residual) +
                    (int64_t{strip.origin.batch} * p.m + row) * p.n + column;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int row_offset = i * Strip<T>::kRowStep;
      if (row + row_offset < p.m && column < p.n)
        residual[i] = load_constant<kLanes>(from + int64_t{row_offset} * p.n);
    }
  }
  float values[kItems][kLanes];
#pragma unroll
  for (int i = 0; i < kItems; ++i) widen(load_vector<kLanes>(strip.item(i)), values[i]);
  with_activation(
      p.activation,
      [&](auto tag) {
        using Act = typename decltype(tag)::type;
#pragma unroll
        for (int i = 0; i < kItems * kLanes; ++i) {
          float& value = values[i / kLanes][i % kLanes];
          value = Act::template value<FastMath>(value);
        }
      },
      Activations{});
  if (p.residual != nullptr) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      float addend[kLanes];
      widen(residual[i], addend);
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) values[i][lane] += addend[lane];
    }
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) device::store(strip.item(i), values[i]);
}

/// Prefetches a tile's residual into L2, so that it is there when the sums are.
template <class T>
__device__ __forceinline__ void prefetch_residual(const Parameters& p, const Tile& tile,
                                                  int thread) {
  if (p.residual == nullptr) return;
  constexpr int kLine = 128 / static_cast<int>(sizeof(T));
  constexpr int kLinesOfRow = kTileColumns / kLine;
  for (int line = thread; line < kTileRows * kLinesOfRow; line += kFinishers * kWarpLanes) {
    const int row = tile.row + line / kLinesOfRow;
    const int column = tile.column + line % kLinesOfRow * kLine;
    if (row >= p.m || column >= p.n) continue;
    const T* from =
        static_cast<const T*>(p.residual) + (int64_t{tile.batch} * p.m + row) * p.n + column;
    device::prefetch_to_l2(from);
  }
}

/// The work of one finisher warp: every third strip of each multiplier's sums.
template <class T>
__device__ __forceinline__ void finish(const Parameters& p, Shared<T>& shared, int finisher,
                                       int lane) {
  const bool has_work = p.activation != kActivation<None> || p.residual != nullptr;
  uint32_t parity = 0;
  for (int index = blockIdx.x; index < p.tiles; index += gridDim.x, parity ^= 1) {
    const Tile tile = tile_at(p, index);
    prefetch_residual<T>(p, tile, finisher * kWarpLanes + lane);
#pragma unroll 1
    for (int multiplier = 0; multiplier < kMultipliers; ++multiplier) {
      constexpr int kStripsOfSlice = wgmma::kRows / kStripRows;
      const auto for_each_strip = [&](const auto& body) {
#pragma unroll 1
        for (int i = finisher; i < kSlices * kStripsOfSlice; i += kFinishers) {
          const int slice = i / kStripsOfSlice;
          const int row = i % kStripsOfSlice * kStripRows;
          body(Strip<T>{shared.sums[multiplier][slice] + row * kSliceColumns,
                        {tile.row + multiplier * wgmma::kRows + row,
                         tile.column + slice * kSliceColumns, tile.batch},
                        lane});
        }
      };
      const auto store = [&](const CUtensorMap& map, const Strip<T>& strip) {
        if (lane == 0)
          store_box(map, strip.origin.column, strip.origin.row, strip.origin.batch, strip.data);
      };
      wait_for_phase(&shared.sums_full[multiplier], parity);
      if (p.keeps_preactivation) {
        for_each_strip([&](const Strip<T>& strip) { store(p.preactivation, strip); });
        close_stores();
        wait_until_read<0>();
        __syncwarp();
      }
      for_each_strip([&](const Strip<T>& strip) {
        if (has_work) {
          finish_strip(p, strip);
          fence_before_copy();
          __syncwarp();
        }
        store(p.out, strip);
      });
      close_stores();
      // A multiplier's buffer is released once the copy engine has read it. The engine first serves
      // the panels that were requested earlier, so the wait comes one buffer later: the first
      // multiplier's buffer is released while the second's is finished.
      if (multiplier > 0) {
        wait_until_read<1>();
        if (lane == 0) ::cuda::ptx::mbarrier_arrive(&shared.sums_empty[multiplier - 1]);
      }
    }
    wait_until_read<0>();
    if (lane == 0) ::cuda::ptx::mbarrier_arrive(&shared.sums_empty[kMultipliers - 1]);
  }
}

}  // namespace torchkiln::gemm::sm90
