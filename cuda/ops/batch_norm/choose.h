#pragma once

// Selects the kernels of batch norm and how the elements are shared among their blocks: forward.cu
// and backward.cu have the tables. Includes no header of CUDA.

#include <algorithm>
#include <climits>
#include <initializer_list>
#include <optional>

#include "detail/reduce/plans.h"
#include "torchkiln/device/fast_divide.cuh"
#include "torchkiln/kernels/batch_norm.h"

namespace torchkiln::cuda {

using namespace device;

inline constexpr int kChannelThreads = 256;
/// Elements per vector, whose signs fill a byte. float32 takes two loads of 16 bytes.
inline constexpr int kChannelLanes = 8;
/// Vectors of a segment per thread.
inline constexpr int kChannelItems = 8;

// Blocks per SM: for moments, with 32 KiB of vectors in flight per block; for outputs and
// gradients, with up to 64 KiB; and for kernels with both passes.
inline constexpr int kMomentBlocks = 2;
inline constexpr int kOutputBlocks = 3;
inline constexpr int kBackwardBlocks = 2;
inline constexpr int kBackwardElementBlocks = 3;  // backward, single elements of up to 4 bytes
inline constexpr int kResidentBlocks = 2;
static_assert(kBackwardBlocks == kResidentBlocks, "choose() makes one plan for both");

/// Shared memory of a block for the vectors in flight. It limits an SM of 9.0 to kOutputBlocks
/// blocks of the pass that writes outputs. If four fit, the SMs that finish the previous kernel
/// first take too many of the blocks.
inline constexpr int kRingBytes = 64 * 1024;

/// Fewest planes of a channel that are folded to rows of all channels. Partial sums take up to 24
/// bytes per column. Planes of at least kLargePlane elements in whole vectors can be read as they
/// are, so folding them pays only for many rows.
inline constexpr int64_t kLargePlane = 256;
inline constexpr int64_t kFewestFolded = 32;
inline constexpr int64_t kFewestLargeFolded = 128;
/// Planes are also folded where many channels have so few elements that a block for each would have
/// at most one per thread, or two if the planes are short: each column has partial sums.
inline constexpr int64_t kShortChannel = kChannelThreads;
inline constexpr int64_t kShortPlane = kShortChannel / 2;
inline constexpr int64_t kManyChannels = 1024;

/// Shared memory of a block with both passes: an SM of 9.0 has room for two blocks of 113 KiB, and
/// 1 KiB more for the system in each. The threads' sums have their own part, since the rows stay.
inline constexpr int kResidentBytes = 112 * 1024;
inline constexpr int kResidentColumns = 2 * kChannelThreads;  // of a block, at most
/// The most shared memory of a block on 9.0 and 10.0. Where it is less, an SM does not hold two
/// blocks.
inline constexpr int kSharedOf90 = 227 * 1024;
/// Most vectors per thread of a block that reads its channels alone where several could share them.
inline constexpr int64_t kWholeItems = 8;
/// Most elements for which one kernel does both passes and writes grad_residual. Three or four
/// larger tensors do not fit the L2 cache, where the second of two kernels reads one tensor less.
inline constexpr int64_t kMostWithResidual = int64_t{1} << 24;

// Totals of the parts of each channel: a block adds up kChannelsOfTotal channels.
inline constexpr int kChannelTotalThreads = 512;
inline constexpr int kChannelsOfTotal = 8;  // 32 bytes of float32, a sector
inline constexpr int kThreadsOfTotal = kChannelTotalThreads / kChannelsOfTotal;
inline constexpr int kTotalLoads = 6;  // of a thread at a time
/// Fewest channels of one thread each: about as many as resident blocks of kChannelsOfTotal have.
inline constexpr int64_t kManyTotals = 4096;

/// How the elements are shared among blocks and threads. Depends only on shape and device.
struct ChannelPlan {
  ChannelLayout layout;
  int threads_x;        // along a row or a segment
  int threads_y;        // rows or segments that a block reads at a time
  int64_t tiles;        // blocks along x: tiles of columns, or channels
  int64_t parts;        // blocks along y
  int64_t rows;         // rows, or segments of all planes
  int64_t columns;      // of a row
  Divisor period{};     // columns of a channel
  int64_t segment = 0;  // elements of a segment
  Divisor segments{};   // of a plane
};

/// One kernel over the elements of one or more tensors.
struct ChannelPass {
  bool in_rows;  // rows of adjacent columns, else planes
  int lanes;     // kChannelLanes, or 1 for single elements
  ChannelPlan plan;
  bool whole = false;  // both passes in one kernel, whose blocks have whole channels
};

/// Whether the planes are read as rows of all channels.
inline bool folds_planes(const ChannelLayout& layout) {
  const int64_t columns = layout.channels * layout.inner;
  if (layout.inner == 1 || columns > INT32_MAX) return false;
  const int64_t most = layout.inner <= kShortPlane ? 2 * kShortChannel : kShortChannel;
  if (layout.outer * layout.inner <= most && layout.channels >= kManyChannels) return true;
  const bool is_large = layout.inner % kChannelLanes == 0 && layout.inner >= kLargePlane;
  return layout.outer >= (is_large ? kFewestLargeFolded : kFewestFolded) &&
         columns % kChannelLanes == 0;
}

/// A plan for blocks that are resident together, `blocks` per SM.
inline ChannelPlan make_channel_plan(const ChannelLayout& layout, bool in_rows, int lanes,
                                     int blocks, const Device& device) {
  ChannelPlan plan{};
  plan.layout = layout;
  if (in_rows) {
    plan.columns = layout.channels * layout.inner;
    plan.period = Divisor(static_cast<uint32_t>(layout.inner));
    const reduce::columns::Plan columns =
        reduce::columns::make_plan(layout.outer, plan.columns, lanes, blocks, device);
    plan.threads_x = columns.threads_x;
    plan.threads_y = columns.threads_y;
    plan.tiles = columns.tiles;
    plan.parts = columns.chunks;
    plan.rows = layout.outer;
  } else {
    plan.columns = layout.channels;
    const int64_t vectors = ceil_div(layout.inner, lanes);
    plan.threads_x = 1;
    while (plan.threads_x < kChannelThreads && int64_t{plan.threads_x} * kChannelItems < vectors)
      plan.threads_x *= 2;
    // Few planes: all threads of the block share them.
    while (layout.outer < kChannelThreads / plan.threads_x && plan.threads_x < vectors)
      plan.threads_x *= 2;
    plan.threads_y = kChannelThreads / plan.threads_x;
    const int64_t segments = ceil_div(vectors, int64_t{plan.threads_x} * kChannelItems);
    plan.segment = ceil_div(vectors, segments) * lanes;
    plan.segments = Divisor(static_cast<uint32_t>(segments));
    plan.rows = layout.outer * segments;
    plan.tiles = layout.channels;
    const int64_t wave = int64_t{device.multiprocessors} * blocks;
    plan.parts = reduce::parts_filling_waves(plan.tiles, ceil_div(plan.rows, plan.threads_y), wave);
  }
  constexpr int64_t kMaxGridY = 65535;
  plan.parts = plan.parts > kMaxGridY ? kMaxGridY : plan.parts;
  return plan;
}

/// Elements that a kernel reads and writes together: vectors if every row or plane consists of
/// whole ones. float64 has single elements only, which saves an instantiation.
inline int channel_lanes(Dtype dtype, const ChannelLayout& layout, bool in_rows,
                         std::initializer_list<const void*> tensors) {
  const int64_t length = in_rows ? layout.channels * layout.inner : layout.inner;
  bool in_vectors = size_of(dtype) < 8 && length % kChannelLanes == 0;
  for (const void* tensor : tensors) in_vectors = in_vectors && aligned(tensor);
  return in_vectors ? kChannelLanes : 1;
}

inline ChannelPass make_channel_pass(Dtype dtype, const ChannelLayout& layout,
                                     std::initializer_list<const void*> tensors, int blocks,
                                     const Device& device) {
  const bool in_rows = layout.inner == 1 || folds_planes(layout);
  const int lanes = channel_lanes(dtype, layout, in_rows, tensors);
  return {in_rows, lanes, make_channel_plan(layout, in_rows, lanes, blocks, device)};
}

/// Lets each block read its channels alone and make both passes, if that takes less time than the
/// launch of three kernels. Blocks with planes of many channels do so in any case.
inline void make_whole(ChannelPass& pass) {
  ChannelPlan& plan = pass.plan;
  const ChannelLayout& layout = plan.layout;
  if (layout.numel() == 0 || plan.columns != layout.channels) return;
  const int64_t vectors = pass.in_rows ? layout.outer * plan.threads_x
                                       : layout.outer * ceil_div(layout.inner, pass.lanes);
  const bool few = vectors <= kWholeItems * kChannelThreads;
  if (!few && (pass.in_rows || plan.parts > 1)) return;
  plan.parts = 1;
  pass.whole = true;
}

/// The plan of one kernel that makes both passes with a resident grid; nullopt if there is none.
/// `pass` is the plan of two kernels, with kResidentBlocks blocks per SM.
inline std::optional<ChannelPass> make_resident_pass(const ChannelPass& pass,
                                                     const Device& device) {
  const ChannelPlan& plan = pass.plan;
  const bool in_rows = plan.layout.inner == 1 && pass.lanes > 1 && plan.layout.numel() > 0;
  if (!in_rows || !device.runs_90_code || device.shared_bytes < kSharedOf90) return std::nullopt;
  const int64_t most = int64_t{device.multiprocessors} * kResidentBlocks / plan.tiles;
  if (most == 0 || plan.threads_x * pass.lanes > kResidentColumns) return std::nullopt;
  ChannelPass resident = pass;
  resident.plan.parts = std::min(most, ceil_div(plan.rows, plan.threads_y));
  return resident;
}

/// The kernels of a forward: `resident`; or `moments` and their merge, if training and `outputs` is
/// not whole, and `outputs`.
struct BatchNormPlan {
  std::optional<ChannelPass> resident;
  std::optional<ChannelPass> moments;
  std::optional<ChannelPass> outputs;
};

inline ChannelPass choose_moments(const BatchNorm& p, const Device& device) {
  return make_channel_pass(p.dtype, p.layout, {p.x}, kMomentBlocks, device);
}

inline ChannelPass choose_outputs(const BatchNorm& p, const Device& device) {
  return make_channel_pass(p.dtype, p.layout, {p.x, p.residual, p.y}, kOutputBlocks, device);
}

inline BatchNormPlan choose(const BatchNorm& p, const Device& device) {
  BatchNormPlan plan{};
  plan.outputs = choose_outputs(p, device);
  if (p.training) make_whole(*plan.outputs);
  if (p.training && !plan.outputs->whole) {
    if (p.residual == nullptr && p.signs == nullptr) {
      const auto tensors = {p.x, static_cast<const void*>(p.y)};
      plan.resident = make_resident_pass(
          make_channel_pass(p.dtype, p.layout, tensors, kResidentBlocks, device), device);
    }
    if (plan.resident) return {plan.resident, std::nullopt, std::nullopt};
    plan.moments = choose_moments(p, device);
  }
  return plan;
}

/// Blocks per SM of a backward. Single elements need no shared memory for vectors in flight.
TORCHKILN_HOST_DEVICE constexpr int backward_blocks(int64_t size_of_element, int lanes) {
  return lanes == 1 && size_of_element < 8 ? kBackwardElementBlocks : kBackwardBlocks;
}

inline ChannelPass choose_passes(const BatchNormBackward& p, const Device& device) {
  const auto tensors = {p.grad,
                        p.second,
                        p.x,
                        p.residual,
                        static_cast<const void*>(p.signs),
                        static_cast<const void*>(p.grad_x),
                        static_cast<const void*>(p.grad_residual)};
  const ChannelPass pass = make_channel_pass(p.dtype, p.layout, tensors, kBackwardBlocks, device);
  const int blocks = backward_blocks(static_cast<int64_t>(size_of(p.dtype)), pass.lanes);
  if (blocks == kBackwardBlocks) return pass;
  return make_channel_pass(p.dtype, p.layout, tensors, blocks, device);
}

/// Whether the kernel of the sums has all terms of its channels, so that no other kernel adds them.
/// With several waves of blocks, the last steps of each block would take longer than a kernel.
inline bool finishes_sums(const BatchNormBackward& p, const ChannelPlan& plan,
                          const Device& device) {
  return plan.parts == 1 && plan.columns == p.layout.channels &&
         plan.tiles <= device.multiprocessors * kBackwardBlocks;
}

/// The kernel that adds the parts of channels: kThreadsOfTotal threads for each, or one thread each
/// where many channels have few parts.
struct TotalPlan {
  bool has_one;
  int64_t blocks;
};

/// `terms`: partial sums of each channel.
inline TotalPlan choose_totals(int64_t channels, int64_t terms) {
  const bool has_one = terms <= kTotalLoads && channels >= kManyTotals;
  return {has_one, ceil_div(channels, has_one ? kChannelTotalThreads : kChannelsOfTotal)};
}

/// The kernels of a backward: `resident`; or sums, their total and grad_x. Both sums and grad_x use
/// the plan `passes`.
struct BatchNormBackwardPlan {
  std::optional<ChannelPass> resident;
  ChannelPass passes;
};

inline BatchNormBackwardPlan choose(const BatchNormBackward& p, const Device& device) {
  ChannelPass passes = choose_passes(p, device);
  if (p.training) make_whole(passes);
  if (passes.whole) {
    // The blocks do not depend on which gradients are wanted, so neither do the bits of the sums.
    passes.whole = p.grad_x != nullptr && p.second == nullptr;
    return {std::nullopt, passes};
  }
  const bool fits_cache = p.grad_residual == nullptr || p.layout.numel() <= kMostWithResidual;
  if (!p.training || !p.needs_sums() || !fits_cache) return {std::nullopt, passes};
  return {make_resident_pass(passes, device), passes};
}

}  // namespace torchkiln::cuda
