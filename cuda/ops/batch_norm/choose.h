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
/// Elements per vector: their eight sign bits fill a byte. A vector of float32 takes two loads of
/// 16 bytes.
inline constexpr int kChannelLanes = 8;
/// Vectors of a segment per thread.
inline constexpr int kChannelItems = 8;

// Blocks per SM. Kernels of moments have 32 KiB of vectors in flight per block, kernels of outputs
// and of gradients up to 64 KiB. kResidentBlocks is for kernels that make both passes.
inline constexpr int kMomentBlocks = 2;
inline constexpr int kOutputBlocks = 3;
inline constexpr int kBackwardBlocks = 2;
inline constexpr int kBackwardElementBlocks = 3;  // backward, single elements of up to 4 bytes
inline constexpr int kResidentBlocks = 2;
static_assert(kBackwardBlocks == kResidentBlocks, "choose() makes one plan for both");

/// Shared memory of a block for the vectors in flight. It limits an SM of 9.0 to kOutputBlocks
/// blocks of the pass that writes outputs. If four blocks fit, the SMs that finish the previous
/// kernel first take too many of the blocks.
inline constexpr int kRingBytes = 64 * 1024;

/// Fewest planes per channel for which planes are folded, that is read as rows of all channels.
/// Folded planes need partial sums, up to 24 bytes per column. Planes of at least kLargePlane
/// elements in whole vectors are fast without folding, so these are folded only from
/// kFewestLargeFolded planes on.
inline constexpr int64_t kLargePlane = 256;
inline constexpr int64_t kFewestFolded = 32;
inline constexpr int64_t kFewestLargeFolded = 128;
/// Planes are also folded if there are at least kManyChannels channels of few elements. With a
/// block per channel, each thread would have at most one element, or two if the planes are short.
inline constexpr int64_t kShortChannel = kChannelThreads;
inline constexpr int64_t kShortPlane = kShortChannel / 2;
inline constexpr int64_t kManyChannels = 1024;

/// Shared memory of a block of the resident kernel. An SM of 9.0 has room for two blocks of 113
/// KiB, including 1 KiB that the system reserves per block. The sums of the threads have their own
/// part of it, because the kept rows are still needed.
inline constexpr int kResidentBytes = 112 * 1024;
inline constexpr int kResidentColumns = 2 * kChannelThreads;  // most columns per block
/// Shared memory that a block can have on 9.0 and 10.0. On GPUs with less, two resident blocks do
/// not fit on an SM.
inline constexpr int kSharedOf90 = 227 * 1024;
/// Maximum number of vectors per thread for which one block processes whole channels, even if
/// several blocks could share the channels.
inline constexpr int64_t kWholeItems = 8;
/// Maximum number of elements for which the resident kernel writes grad_residual, too. The resident
/// kernel reads every tensor again in its second pass. Two kernels read one tensor less, which is
/// faster once the tensors do not fit in the L2 cache.
inline constexpr int64_t kMostWithResidual = int64_t{1} << 24;

// Totals of the parts of each channel: a block adds the parts of kChannelsOfTotal channels.
inline constexpr int kChannelTotalThreads = 512;
inline constexpr int kChannelsOfTotal = 8;  // a row of sums is a sector: 32 bytes of float32
inline constexpr int kThreadsOfTotal = kChannelTotalThreads / kChannelsOfTotal;
inline constexpr int kTotalLoads = 6;  // in flight per thread
/// Fewest channels for which one thread adds the parts of a channel. About as many channels occupy
/// all SMs with blocks of kChannelsOfTotal channels.
inline constexpr int64_t kManyTotals = 4096;

/// The distribution of the elements over blocks and threads. Depends only on shape and device.
struct ChannelPlan {
  ChannelLayout layout;
  int threads_x;        // threads along a row or a segment
  int threads_y;        // rows or segments that a block reads at a time
  int64_t tiles;        // blocks along x: tiles of columns, or channels
  int64_t parts;        // blocks along y, which share the rows
  int64_t rows;         // rows, or segments of all planes
  int64_t columns;      // columns per row
  Divisor period{};     // columns of a channel
  int64_t segment = 0;  // elements of a segment
  Divisor segments{};   // segments per plane
};

/// One kernel over the elements of one or more tensors.
struct ChannelPass {
  bool in_rows;  // rows of adjacent columns, else planes
  int lanes;     // kChannelLanes, or 1 for single elements
  ChannelPlan plan;
  bool whole = false;  // one kernel for both passes: a block has whole channels
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

/// A plan for `blocks` blocks per SM that are all resident at the same time.
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

/// Elements per access: a vector of kChannelLanes if every row or plane consists of whole vectors,
/// else one. float64 always has one, which saves an instantiation.
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

/// Lets each block process whole channels in both passes, if this takes less time than launching
/// three kernels. Blocks that already have all planes of a channel always do so.
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

/// The kernels of a forward: `resident` alone, or `moments`, their merge and `outputs`. Outside of
/// training, and if `outputs` is whole, there are no moments and no merge.
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

/// Whether the kernel of the sums also computes the gradients and coefficients of its channels,
/// without a kernel for totals. With several waves of blocks, this last step of each block would
/// take longer than that kernel.
inline bool finishes_sums(const BatchNormBackward& p, const ChannelPlan& plan,
                          const Device& device) {
  return plan.parts == 1 && plan.columns == p.layout.channels &&
         plan.tiles <= device.multiprocessors * kBackwardBlocks;
}

/// The kernel that adds the parts of each channel: kThreadsOfTotal threads per channel or, if many
/// channels have few parts (has_one), one thread.
struct TotalPlan {
  bool has_one;
  int64_t blocks;
};

/// `terms`: partial sums of each channel.
inline TotalPlan choose_totals(int64_t channels, int64_t terms) {
  const bool has_one = terms <= kTotalLoads && channels >= kManyTotals;
  return {has_one, ceil_div(channels, has_one ? kChannelTotalThreads : kChannelsOfTotal)};
}

/// The kernels of a backward: `resident`; or the sums, their total and grad_x, where the kernels of
/// sums and grad_x use the plan `passes`.
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
