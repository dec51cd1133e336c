#pragma once

// Rows of adjacent channels, one for each pixel of each sample (channels_last). Block (x, y, z) has
// a tile of columns, every parts-th group of rows, and every step-th sample.

#include "factors.cuh"

namespace torchkiln::cuda {
namespace {

/// The plan of one sample, with parts so that the blocks of all samples fill the device.
template <class Access>
ChannelPlan make_sample_plan(const GroupLayout& layout, int blocks) {
  constexpr int64_t kMinRows = 8;  // of a thread: with fewer, partial sums cost more than they gain
  ChannelPlan plan = make_channel_plan<Access>({layout.inner, layout.channels, 1}, blocks);
  const int64_t wave = int64_t{current_device().multiprocessors} * blocks;
  const int64_t most = ceil_div(layout.inner, plan.threads_y * kMinRows);
  const int64_t parts = reduce::parts_filling_waves(plan.tiles * layout.batch, most, wave);
  plan.parts = parts < 65535 ? parts : 65535;
  return plan;
}

inline Status grid_of_samples(const ChannelPlan& plan, int64_t samples, Grid& grid) {
  const Status status = grid_of(plan, grid);
  grid.blocks.z = static_cast<unsigned>(samples < 65535 ? samples : 65535);
  return status;
}

/// Calls body(sample, index of its first element) for each sample of the block, which may use the
/// shared memory each time.
template <class Body>
__device__ __forceinline__ void for_each_sample(const GroupLayout& layout, const Body& body) {
  for (int64_t sample = blockIdx.z; sample < layout.batch; sample += gridDim.z) {
    body(sample, sample * layout.inner * layout.channels);
    __syncthreads();
  }
}

/// Calls body(access, plan, grid).
template <class Problem, class Body>
Status with_rows(const Problem& p, int blocks, std::initializer_list<const void*> tensors,
                 const Body& body) {
  const ChannelLayout layout{p.layout.inner, p.layout.channels, 1};
  return with_channel_access<true>(p.dtype, layout, tensors, [&](auto access) {
    const ChannelPlan plan = make_sample_plan<decltype(access)>(p.layout, blocks);
    Grid grid;
    const Status fits = grid_of_samples(plan, p.layout.batch, grid);
    return fits.ok() ? body(access, plan, grid) : fits;
  });
}

}  // namespace
}  // namespace torchkiln::cuda
