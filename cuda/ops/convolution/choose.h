#pragma once

// Decides whether the kernel of sm90.cu can compute a convolution, and whether it is faster than
// cuDNN by measurement. convolution.cu lists both cases. Includes no header of CUDA.

#include <optional>

#include "detail/gemm/capability.h"
#include "detail/gemm/plans.h"
#include "torchkiln/kernels/convolution.h"

namespace torchkiln::cuda {

using namespace device;

/// The kernel is used if at least this share of the SMs is at work. Measured on an H200 with the
/// convolutions of a ResNet-50 for 256 images: it takes 0.98 to 1.18 times as long as cuDNN where
/// at least 85 % of the SMs are at work, and 1.23 times at 74 %. It saves a pass over y, which
/// takes 0.2 to 0.7 of the convolution's time.
inline constexpr double kLeastShareAtWork = 0.8;
/// Fewest results for which the kernel is used. Below, launches take longer than the work.
inline constexpr int64_t kLeastPixelResults = int64_t{1} << 22;

/// Pixels of a tile. A block computes tiles of 128 channels by kTilePixels pixels, all with the
/// same channels.
inline constexpr int64_t kTilePixels = gemm::sm90::kTileColumns;

struct PixelPlan {
  static constexpr const char* kWhy =
      "Blocks keep their channels, whose moments they add up in registers.";
  int64_t channel_tiles;
  int64_t pixel_tiles;
  int64_t parts;  // blocks that share the pixels of a channel tile
  gemm::Blocks blocks;
  double share_at_work;  // share of the SMs, averaged over the run
};

inline bool fits(const PixelConvolution& p) {
  const auto fits_rows = [&](const void* data, int64_t rows, int64_t columns) {
    return gemm::fits_tensor_map(gemm::sm90::describe_rows(data, rows, columns), p.dtype);
  };
  return size_of(p.dtype) == 2 && p.pixels != 0 && p.in != 0 && p.out != 0 &&
         fits_rows(p.x, p.pixels, p.in) && fits_rows(p.weight, p.out, p.in) &&
         fits_rows(p.y, p.pixels, p.out);
}

/// The plan of the kernel; nullopt if it does not support the convolution.
inline std::optional<PixelPlan> choose(const PixelConvolution& p, const Device& device) {
  if (!gemm::has_sm90(device) || !fits(p)) return std::nullopt;
  PixelPlan plan{};
  plan.channel_tiles = ceil_div(p.out, int64_t{gemm::sm90::kTileRows});
  plan.pixel_tiles = ceil_div(p.pixels, kTilePixels);
  const int64_t most = std::max<int64_t>(device.multiprocessors / plan.channel_tiles, 1);
  plan.parts = std::min(most, plan.pixel_tiles);
  plan.blocks = {plan.parts * plan.channel_tiles, gemm::sm90::kThreads,
                 gemm::sm90::kPixelSharedBytes};
  const int64_t rounds = ceil_div(plan.pixel_tiles, plan.parts);
  plan.share_at_work = static_cast<double>(plan.pixel_tiles * plan.channel_tiles) /
                       static_cast<double>(rounds * device.multiprocessors);
  return plan;
}

/// Whether the plan takes less time than cuDNN's convolution and another pass for the moments.
inline bool gains(const PixelConvolution& p, const Device& device) {
  if (p.pixels * p.out < kLeastPixelResults) return false;
  const auto plan = choose(p, device);
  return plan && plan->share_at_work >= kLeastShareAtWork;
}

}  // namespace torchkiln::cuda
