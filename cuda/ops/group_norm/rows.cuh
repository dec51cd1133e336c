#pragma once

// Rows of adjacent channels, one for each pixel of each sample (channels_last). Block (x, y, z)
// reads a tile of columns in every parts-th group of rows of every gridDim.z-th sample.

#include "factors.cuh"

namespace torchkiln::cuda {
namespace {

inline Status grid_of_samples(const ChannelPlan& plan, int64_t samples, Grid& grid) {
  const Status status = grid_of(plan, grid);
  grid.blocks.z = static_cast<unsigned>(samples < 65535 ? samples : 65535);
  return status;
}

/// Calls body(sample, index of its first element) for each sample of the block. Each call of body
/// may use the shared memory.
template <class Body>
__device__ __forceinline__ void for_each_sample(const GroupLayout& layout, const Body& body) {
  for (int64_t sample = blockIdx.z; sample < layout.batch; sample += gridDim.z) {
    body(sample, sample * layout.inner * layout.channels);
    __syncthreads();
  }
}

/// Calls body(access, grid).
template <class Problem, class Body>
Status with_rows(const Problem& p, const ChannelPass& pass, const Body& body) {
  Grid grid;
  const Status fits = grid_of_samples(pass.plan, p.layout.batch, grid);
  if (!fits.ok()) return fits;
  return with_channel_access<true>(p.dtype, pass.lanes,
                                   [&](auto access) { return body(access, grid); });
}

}  // namespace
}  // namespace torchkiln::cuda
