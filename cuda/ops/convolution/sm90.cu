// Convolutions of one element per filter on compute capability 9.0, compiled for 90a only, with the
// moments of their results.
//
// A block computes tiles of 128 channels by 256 pixels, transposed: the sums of a channel lie in
// the registers of four threads, which add up its moments there. Blocks are persistent and keep
// their channels: block i has tile i % channel_tiles of the channels, and every parts-th tile of
// the pixels. The blocks with the same pixels run together, so that x is read from memory once.
//
//   producer     one thread: copies panels of the weight and of x into a ring of stages
//   multipliers  two warpgroups: 64 channels each; they round, add up the moments and store

#include "detail/gemm/sm90_roles.cuh"
#include "pixels.h"
#include "torchkiln/device/launch.cuh"

namespace torchkiln::gemm::sm90 {
namespace {

using reduce::Moments;

constexpr int kPixels = cuda::kTilePixels;

struct PixelParameters {
  CUtensorMap weight;
  CUtensorMap x;
  CUtensorMap y;
  Moments* moments;
  int pixels;
  int out;
  int depth_steps;
  int channel_tiles;
  int pixel_tiles;
  int parts;
};

template <class T>
struct alignas(1024) PixelShared {
  T weight[kStages][kPanel];
  T x[kStages][kPanelsOfB * kPanel];
  T y[kMultipliers][kPixels * wgmma::kRows];  // [pixels, channels], swizzled
  StageBarriers<kStages> stages;
};

template <class T>
__device__ __forceinline__ void copy_operands(const PixelParameters& p, PixelShared<T>& shared,
                                              int channel, int part) {
  StageRing<kStages> ring(shared.stages);
  StageCursor<kStages> cursor;
  for (int tile = part; tile < p.pixel_tiles; tile += p.parts) {
    for (int step = 0; step < p.depth_steps; ++step, cursor.advance()) {
      const int depth = step * kTileDepth;
      uint64_t* full = ring.claim(cursor, kStageBytes);
      copy_panel<Major::k>(shared.weight[cursor.stage], p.weight, channel, depth, 0, full);
#pragma unroll
      for (int panel = 0; panel < kPanelsOfB; ++panel) {
        copy_panel<Major::k>(shared.x[cursor.stage] + panel * kPanel, p.x,
                             tile * kPixels + panel * kPanelWidth, depth, 0, full);
      }
    }
  }
}

/// Waits for all stages and releases them, in a multiplier whose channels are all beyond the last
/// channel.
template <class T>
__device__ __forceinline__ void skip_products(const PixelParameters& p, PixelShared<T>& shared,
                                              int part) {
  StageRing<kStages> ring(shared.stages);
  StageCursor<kStages> cursor;
  if (threadIdx.x % kWarpgroup != 0) return;
  for (int tile = part; tile < p.pixel_tiles; tile += p.parts) {
    for (int step = 0; step < p.depth_steps; ++step, cursor.advance()) {
      ring.wait_full(cursor);
      ring.release(cursor.stage);
    }
  }
}

/// Sums over numbers of their distances from `origin`, which is one of the numbers, and of the
/// squares of these distances.
struct DistanceSums {
  float origin = 0;
  float sum = 0;
  float squares = 0;

  /// Adds a number to the sums of a tile. The tile's sums are added to the total later, because
  /// short sums lose fewer digits than one long sum.
  __device__ __forceinline__ void add(float value, float& tile_sum, float& tile_squares) const {
    const float distance = value - origin;
    tile_sum += distance;
    tile_squares = fmaf(distance, distance, tile_squares);
  }
};

/// Rounds the sums of a tile, adds them to the moments and writes them to shared memory. Only the
/// first `left` pixels are inside the tensor.
template <bool kWhole, class T>
__device__ __forceinline__ void round_tile(T* to, const float (&sums)[wgmma::kSums],
                                           DistanceSums (&moments)[2], int left) {
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  const int lane = thread % kWarpLanes;
  const int block = lane / 8;  // the 8 by 8 block of which the lane addresses a row
  const int chunk = thread / kWarpLanes * 2 + block % 2;
  float tile_sum[2] = {}, tile_squares[2] = {};
#pragma unroll
  for (int group = 0; group < kPixels / 8; group += 2) {
    uint32_t blocks[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int sum = (group + i / 2) * 4 + i % 2 * 2;
      const Vec<T, 2> pair{convert<T>(sums[sum]), convert<T>(sums[sum + 1])};
      blocks[i] = *reinterpret_cast<const uint32_t*>(&pair);
      const int pixel = (group + i / 2) * 8 + lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (kWhole || pixel + j < left)
          moments[i % 2].add(convert<float>(pair.lane[j]), tile_sum[i % 2], tile_squares[i % 2]);
      }
    }
    const int pixel = (group + block / 2) * 8 + lane % 8;
    wgmma::store_blocks<true>(reinterpret_cast<char*>(to) + swizzled(pixel, chunk), blocks);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    moments[i].sum += tile_sum[i];
    moments[i].squares += tile_squares[i];
  }
}

/// Adds the sums of the four threads of a channel.
__device__ __forceinline__ double add_quad(double value) {
  value += __shfl_xor_sync(0xffffffff, value, 1);
  return value + __shfl_xor_sync(0xffffffff, value, 2);
}

template <class T>
__device__ __forceinline__ void multiply_pixels(const PixelParameters& p, PixelShared<T>& shared,
                                                int multiplier, int channel, int part) {
  StageRing<kStages> ring(shared.stages);
  StageCursor<kStages> cursor;
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  T* const staged = shared.y[multiplier];
  float sums[wgmma::kSums];
  DistanceSums moments[2];
  int count = 0;
  for (int tile = part; tile < p.pixel_tiles; tile += p.parts) {
    const int last_stage = start_products<T, Major::k, Major::k>(
        ring, cursor, shared.weight, shared.x, multiplier, p.depth_steps, sums);
    if (thread == 0) wait_until_read<0>();  // the store of the previous tile
    sync_multiplier(multiplier);
    wgmma::wait_all(sums);
    if (thread == 0) ring.release(last_stage);
    if (tile == part) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float own = convert<float>(convert<T>(sums[i * 2]));
        moments[i].origin = __shfl_sync(0xffffffff, own, 0, 4);
      }
    }
    const int left = p.pixels - tile * kPixels;
    count += min(left, kPixels);
    if (left >= kPixels) {
      round_tile<true>(staged, sums, moments, left);
    } else {
      round_tile<false>(staged, sums, moments, left);
    }
    fence_before_copy();
    sync_multiplier(multiplier);
    if (thread == 0) {
      store_box(p.y, channel, tile * kPixels, 0, staged);
      close_stores();
    }
  }
  const int lane = thread % kWarpLanes;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const double sum = add_quad(moments[i].sum), squares = add_quad(moments[i].squares);
    const int own = channel + thread / kWarpLanes * 16 + i * 8 + lane / 4;
    if (lane % 4 == 0 && own < p.out)
      p.moments[int64_t{part} * p.out + own] =
          Moments::from_sums(count, moments[i].origin, sum, squares);
  }
  if (thread == 0) wait_until_read<0>();
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    pixel_convolution_kernel(const __grid_constant__ PixelParameters p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<PixelShared<T>*>(memory);
  if (threadIdx.x == 0) StageRing<kStages>(shared.stages).init(kMultipliers);
  __syncthreads();
  wait_for_previous_kernel();
  const int tile_channel = static_cast<int>(blockIdx.x) % p.channel_tiles * kTileRows;
  const int part = static_cast<int>(blockIdx.x) / p.channel_tiles;
  const int multiplier = static_cast<int>(threadIdx.x) / kWarpgroup;
  if (multiplier == kMultipliers) {
    wgmma::decrease_registers<kOtherRegisters>();
    if (threadIdx.x % kWarpgroup == 0) copy_operands(p, shared, tile_channel, part);
    return;
  }
  wgmma::increase_registers<kMultiplierRegisters>();
  const int channel = tile_channel + multiplier * wgmma::kRows;
  if (channel < p.out) {
    multiply_pixels(p, shared, multiplier, channel, part);
  } else {
    skip_products(p, shared, part);
  }
}

template <class T>
Status convolution_of(const PixelConvolution& p, const cuda::PixelPlan& plan, Moments* moments,
                      CUstream_st* stream) {
  PixelParameters parameters{};
  Status status =
      make_tensor_map<T>(parameters.weight, describe_rows(p.weight, p.out, p.in), kPanelWidth);
  if (status.ok())
    status = make_tensor_map<T>(parameters.x, describe_rows(p.x, p.pixels, p.in), kPanelWidth);
  if (status.ok())
    status = make_tensor_map<T>(parameters.y, describe_rows(p.y, p.pixels, p.out), kPixels);
  if (!status.ok()) return status;
  parameters.moments = moments;
  parameters.pixels = static_cast<int>(p.pixels);
  parameters.out = static_cast<int>(p.out);
  parameters.depth_steps = static_cast<int>(ceil_div(p.in, kTileDepth));
  parameters.channel_tiles = static_cast<int>(plan.channel_tiles);
  parameters.pixel_tiles = static_cast<int>(plan.pixel_tiles);
  parameters.parts = static_cast<int>(plan.parts);
  static_assert(sizeof(PixelShared<T>) == kPixelSharedBytes);
  const auto blocks = static_cast<unsigned>(plan.blocks.count);
  const Grid grid{dim3(blocks), dim3(kThreads), 1, kPixelSharedBytes};
  return launch_kernel(pixel_convolution_kernel<T>, grid, /*overlaps=*/true, stream, parameters);
}

}  // namespace

Status pixel_convolution(const PixelConvolution& p, const cuda::PixelPlan& plan, Moments* moments,
                         CUstream_st* stream) {
  if (p.dtype == Dtype::float16) return convolution_of<__half>(p, plan, moments, stream);
  return convolution_of<__nv_bfloat16>(p, plan, moments, stream);
}

}  // namespace torchkiln::gemm::sm90
