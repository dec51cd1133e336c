#pragma once

// What the three roles of matmul_hopper.cuh do: produce(), multiply(), finish().

#include "detail/gemm/sm90_tile.cuh"

namespace torchkiln::gemm::sm90 {

/// Copies kPanelWidth of an operand, from `outer` on, and kTileDepth of k.
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
  StagePlace<kStages> place;
  for (int index = blockIdx.x; index < p.tiles; index += gridDim.x) {
    const Tile tile = tile_at(p, index);
    const int batch_a = p.repeats_a ? 0 : tile.batch;
    const int batch_b = p.repeats_b ? 0 : tile.batch;
    for (int step = 0; step < p.depth_steps; ++step, place.advance()) {
      const int depth = step * kTileDepth;
      uint64_t* full = ring.claim(place, kStageBytes);
      copy_panel<kMajorA>(shared.a[place.stage], p.a, tile.row, depth, batch_a, full);
#pragma unroll
      for (int panel = 0; panel < kPanelsOfB; ++panel) {
        copy_panel<kMajorB>(shared.b[place.stage] + panel * kPanel, p.b,
                            tile.column + panel * kPanelWidth, depth, batch_b, full);
      }
    }
  }
}

/// Of the columns 2 t and 2 t + 1, for thread t of a warpgroup.
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

/// Hands sum * scale + bias over, rounded.
template <class T>
__device__ __forceinline__ void hand_over(T (&to)[kSlices][kSlice], const float* bias, float scale,
                                          int thread, const float (&sums)[wgmma::kSums]) {
  const int lane = thread % kWarpLanes;
  const int row = thread / kWarpLanes * 16 + lane % 16;
  // Four blocks of 8 by 8 at a time: upper and lower, left and right.
  constexpr int kAtOnce = 16;
#pragma unroll
  for (int column = 0; column < kTileColumns; column += kAtOnce) {
    uint32_t blocks[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 more =
          *reinterpret_cast<const float2*>(bias + column + i / 2 * 8 + lane % 4 * 2);
      const int sum = column / 2 + i * 2;
      const Vec<T, 2> pair{convert<T>(sums[sum] * scale + more.x),
                           convert<T>(sums[sum + 1] * scale + more.y)};
      blocks[i] = *reinterpret_cast<const uint32_t*>(&pair);
    }
    const int chunk = column % kSliceColumns / 8 + lane / 16;
    wgmma::store_blocks(reinterpret_cast<char*>(to[column / kSliceColumns]) + swizzled(row, chunk),
                        blocks);
  }
}

template <class T, Major kMajorA, Major kMajorB>
__device__ __forceinline__ void multiply(const Parameters& p, Shared<T>& shared, int multiplier) {
  StageRing<kStages> ring(shared.stages);
  StagePlace<kStages> place;
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  float sums[wgmma::kSums];
  uint32_t turn = 0;
  for (int index = blockIdx.x; index < p.tiles; index += gridDim.x) {
    const Tile tile = tile_at(p, index);
    const float2 bias = load_bias<T>(p, tile.column, thread);  // needed after the products
    int last_stage = 0;
    for (int step = 0; step < p.depth_steps; ++step, place.advance()) {
      ring.wait_full(place);
      // Either way of lying, a multiplier's 64 rows of A are one box.
      const uint64_t a = wgmma::describe<kMajorA>(shared.a[place.stage] + multiplier * kBox, 0);
      const uint64_t b = wgmma::describe<kMajorB>(shared.b[place.stage], kBox * sizeof(T));
      wgmma::fence();
#pragma unroll
      for (int i = 0; i < kTileDepth / wgmma::kDepth; ++i) {
        wgmma::multiply<T, kMajorA, kMajorB>(sums, a + i * wgmma::kNextStep<kMajorA>,
                                             b + i * wgmma::kNextStep<kMajorB>, step + i > 0);
      }
      wgmma::commit();
      // These are under way, those of the stage before are done.
      wgmma::wait<1>();
      if (step > 0 && thread == 0) ring.release(last_stage);
      last_stage = place.stage;
    }
    // Written while the last products run. The one of two tiles ago has been read: since then, all
    // have met.
    float* const own_bias = shared.bias[multiplier][turn];
    *reinterpret_cast<float2*>(own_bias + thread * 2) = bias;
    meet(multiplier);
    wgmma::finish(sums);
    if (thread == 0) ring.release(last_stage);
    wait_for_phase(&shared.sums_empty[multiplier], turn ^ 1);
    hand_over(shared.sums[multiplier], own_bias, p.scale, thread, sums);
    fence_before_copy();
    ::cuda::ptx::mbarrier_arrive(&shared.sums_full[multiplier]);
    turn ^= 1;
  }
}

/// What a warp of the finishers takes at once: 16 rows of a slice, of which a lane has 16 bytes of
/// every fourth.
template <class T>
struct Strip {
  static constexpr int kLanes = kVectorLanes<T>;
  static constexpr int kChunks = kSliceColumns / kLanes;  // of a row
  static constexpr int kRowsApart = kWarpLanes / kChunks;
  static constexpr int kItems = kStripRows / kRowsApart;

  T* at;       // its first row; as many elements of shared memory follow as it has
  Tile place;  // of its first element among the results
  int lane;

  __device__ __forceinline__ int row(int i) const { return i * kRowsApart + lane / kChunks; }
  __device__ __forceinline__ int column() const { return lane % kChunks * kLanes; }
  __device__ __forceinline__ T* item(int i) const {
    // kStripRows are a multiple of the swizzle's eight.
    return reinterpret_cast<T*>(reinterpret_cast<char*>(at) + swizzled(row(i), lane % kChunks));
  }
};

/// sums = activation(sums) + residual, in place.
template <class T>
__device__ __forceinline__ void finish_strip(const Parameters& p, const Strip<T>& strip) {
  constexpr int kLanes = Strip<T>::kLanes;
  constexpr int kItems = Strip<T>::kItems;
  Vec<T, kLanes> residual[kItems] = {};
  if (p.residual != nullptr) {
    const int row = strip.place.row + strip.row(0);
    const int column = strip.place.column + strip.column();
    const T* from =
        static_cast<const T*>(p.residual) + (int64_t{strip.place.batch} * p.m + row) * p.n + column;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int down = i * Strip<T>::kRowsApart;
      if (row + down < p.m && column < p.n)
        residual[i] = load_constant<kLanes>(from + int64_t{down} * p.n);
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
      float more[kLanes];
      widen(residual[i], more);
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) values[i][lane] += more[lane];
    }
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) device::store(strip.item(i), values[i]);
}

/// So that nobody waits for the memory when the sums are there.
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
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
  }
}

/// One warp: every third strip of each multiplier's sums.
template <class T>
__device__ __forceinline__ void finish(const Parameters& p, Shared<T>& shared, int finisher,
                                       int lane) {
  const bool has_work = p.activation != kActivation<None> || p.residual != nullptr;
  uint32_t turn = 0;
  for (int index = blockIdx.x; index < p.tiles; index += gridDim.x, turn ^= 1) {
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
          store_box(map, strip.place.column, strip.place.row, strip.place.batch, strip.at);
      };
      wait_for_phase(&shared.sums_full[multiplier], turn);
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
      // A multiplier's buffer is given back when the copy engine has read it, which comes to that
      // behind the panels it has been asked for: the first one's while the second's is finished.
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
