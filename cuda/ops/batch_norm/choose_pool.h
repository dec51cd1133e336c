#pragma once

// The order in which kernels of batch norm with a max pool visit windows and pixels. Includes no
// header of CUDA.

#include "ops/batch_norm/choose.h"

namespace torchkiln::cuda {

/// The width of windows for which there is a compiled kernel: 3 x 3 or 2 x 2 pixels with stride 2,
/// and relu. 0 for all other windows.
inline int fixed_window(const PoolWindows& windows, Activation activation) {
  const int width = windows.kernel[0];
  const bool is_fixed = activation == kActivation<Relu> && (width == 3 || width == 2) &&
                        windows.kernel[1] == width && windows.stride[0] == 2 &&
                        windows.stride[1] == 2;
  return is_fixed ? width : 0;
}

/// Blocks per SM: as many as registers allow without spills.
constexpr int pool_blocks(int fixed_window) { return fixed_window > 0 ? 3 : 2; }
inline constexpr int kPoolBackwardBlocks = 2;

/// Whether a thread computes the gradients of stride x stride pixels, so that it reads their
/// windows once. If not (float32, or windows that are not known at compile time), it computes one
/// pixel.
constexpr bool computes_in_blocks(int fixed_window, size_t element) {
  return fixed_window > 0 && element == 2;
}

/// The positions that a kernel visits, one per step.
enum class Walk {
  windows,
  pixels,
  /// Blocks of stride x stride pixels. Each begins at the first pixel of a window.
  blocks,
};

/// Number of positions per image, along both axes.
struct WalkExtent {
  int64_t rows;
  int64_t columns;
};

inline WalkExtent walk_extent(const PoolWindows& windows, Walk over) {
  const auto extent = [&](int d, int64_t size, int64_t pooled) {
    if (over == Walk::windows) return pooled;
    return over == Walk::pixels ? size : ceil_div(size + windows.padding[d], windows.stride[d]);
  };
  return {extent(0, windows.height, windows.pooled_height),
          extent(1, windows.width, windows.pooled_width)};
}

/// One kernel over the positions of all images.
struct PoolPass {
  int fixed_window;
  WalkExtent walked;
  ChannelPlan plan;
};

inline PoolPass make_pool_pass(const PoolWindows& windows, int fixed_window, Walk over,
                               int64_t channels, int blocks, const Device& device) {
  const WalkExtent walked = walk_extent(windows, over);
  const int64_t steps = windows.images * walked.rows * walked.columns;
  return {fixed_window, walked,
          make_channel_plan({steps, channels, 1}, /*in_rows=*/true, kChannelLanes, blocks, device)};
}

inline PoolPass choose_outputs(const BatchNormPool& p, const Device& device) {
  const int fixed = fixed_window(p.windows, p.norm.activation);
  return make_pool_pass(p.windows, fixed, Walk::windows, p.norm.layout.channels, pool_blocks(fixed),
                        device);
}

inline PoolPass choose_sums(const BatchNormPoolBackward& p, const Device& device) {
  return make_pool_pass(p.windows, fixed_window(p.windows, p.norm.activation), Walk::windows,
                        p.norm.layout.channels, kPoolBackwardBlocks, device);
}

inline PoolPass choose_gradients(const BatchNormPoolBackward& p, const Device& device) {
  const int fixed = fixed_window(p.windows, p.norm.activation);
  const bool in_blocks = computes_in_blocks(fixed, size_of(p.norm.dtype));
  return make_pool_pass(p.windows, fixed, in_blocks ? Walk::blocks : Walk::pixels,
                        p.norm.layout.channels, kPoolBackwardBlocks, device);
}

}  // namespace torchkiln::cuda
