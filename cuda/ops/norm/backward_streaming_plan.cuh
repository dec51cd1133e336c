#pragma once

// How the streaming gradients of norms distribute rows, and how many of them are in flight.

#include "backward_streaming_kernel.cuh"

namespace torchkiln::cuda::norm_gradients {
namespace {

/// How many clusters run at the same time; a block fills an SM. The blocks of a cluster belong to
/// one GPC, and not every GPC has a multiple of the cluster size. One more cluster would start when
/// the others are done and double the time. 0 if no GPC is large enough.
int64_t resident_clusters(const StreamPlan& plan) {
  const int blocks = plan.team.blocks();
  if (blocks == 1) return current_device().multiprocessors;
  constexpr int kDevices = 64;
  static int cached[kDevices][kLargeClusterBlocks + 1] = {};  // a race is harmless: same values
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kDevices) return 0;
  int& entry = cached[device][blocks];
  int found = __atomic_load_n(&entry, __ATOMIC_RELAXED);
  if (found == 0) {
    // One instance is queried for all: a block of each takes all registers of an SM.
    const auto kernel = stream_rows<RowVectors<float, kVectorLanes<float>, true>, false, false, 2>;
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(static_cast<unsigned>(plan.team.block_threads()));
    config.dynamicSmemBytes = static_cast<size_t>(plan.shared_bytes);
    config.attrs = &cluster;
    config.numAttrs = 1;
    const bool succeeded =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             plan.shared_bytes) == cudaSuccess &&
        (blocks <= kMaxClusterBlocks ||
         cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) ==
             cudaSuccess) &&
        cudaOccupancyMaxActiveClusters(&found, kernel, &config) == cudaSuccess;
    (void)cudaGetLastError();
    if (!succeeded || found < 1) found = -1;
    __atomic_store_n(&entry, found, __ATOMIC_RELAXED);
  }
  return std::max(found, 0);
}

}  // namespace

StreamPlan plan_stream(const NormBackward& p, Alignment alignment) {
  StreamPlan plan{};
  if (alignment == Alignment::scalar) return plan;
  const int lanes = kVectorBytes / static_cast<int>(size_of(p.dtype));
  const int64_t vectors = ceil_div(p.columns, lanes) + (alignment == Alignment::vector ? 0 : 1);
  const int64_t threads = ceil_div(vectors, kItems);
  const Device device = current_device();
  const int max_blocks = device.runs_90_code ? kMaxClusterBlocks : 1;
  plan.team = make_team(threads, kThreads, kThreads, max_blocks);
  if (plan.team.size() < threads && max_blocks > 1)
    plan.team = make_team(threads, kLargeBlockWarps * kWarpLanes, kThreads, kLargeClusterBlocks);
  if (plan.team.size() < threads) return plan;
  const auto shared_bytes = [&](int stages) {
    const int parameters = lanes * static_cast<int>(sum_bytes(p)) * plan.team.threads;
    return kItems * (stages * 2 * kVectorBytes * kThreads + parameters);
  };
  const auto fits = [&](int stages) {
    const bool large = plan.team.blocks() > kMaxClusterBlocks;
    const size_t storage = stages == 3 ? sizeof(TeamStorage<float, 2>)
                                       : sizeof(TeamStorage<float, 2, kLargeClusterWarps>);
    const int storage_bytes = static_cast<int>(storage * (sum_bytes(p) / sizeof(float)));
    return !(large && stages == 3) && shared_bytes(stages) + storage_bytes <= device.shared_bytes;
  };
  if (!fits(2)) return plan;
  plan.stages = fits(3) ? 3 : 2;
  plan.shared_bytes = shared_bytes(plan.stages);
  plan.teams = std::min(resident_clusters(plan), ceil_div(p.rows, plan.team.per_block));
  // A multiple of the number of lanes: all rows of a block then have the same offset from a
  // 16-byte boundary.
  if (alignment == Alignment::shared_offset && plan.teams > 0)
    plan.teams = std::max<int64_t>(plan.teams / lanes, 1) * lanes;
  return plan;
}

}  // namespace torchkiln::cuda::norm_gradients
