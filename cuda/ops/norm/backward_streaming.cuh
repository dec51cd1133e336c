#pragma once

// Launch of the streaming gradients of norms: how rows are distributed, and how many are in flight.

#include "backward_streaming_kernel.cuh"
#include "detail/reduce/columns.cuh"

namespace torchkiln::cuda {

using namespace reduce;
namespace {

Alignment backward_alignment(const NormBackward& p) {
  const TensorRows tensors[] = {{p.grad, p.grad_row_stride},
                                {p.z, p.z_row_stride},
                                {p.grad_sum, p.grad_sum_row_stride},
                                {p.grad_x, p.columns}};
  const Alignment alignment = alignment_of(tensors, p.dtype, p.rows, p.columns);
  return alignment == Alignment::vector && !aligned(p.weight) ? alignment_with_offset(p.dtype)
                                                              : alignment;
}

/// How rows are streamed. teams is 0 if they cannot be: too long, or without a shared offset.
struct StreamPlan {
  TeamShape team;
  int stages;  // rows in shared memory or in flight
  int shared_bytes;
  int64_t teams;  // blocks, or clusters
};

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

int result_count(const NormBackward& p) {
  return (p.grad_weight != nullptr ? 1 : 0) + (p.grad_bias != nullptr ? 1 : 0);
}

template <class Access, bool kCentered, bool kAdds, int kStages>
Status launch_stream(const NormBackward& p, const StreamPlan& plan, Allocate allocate,
                     CUstream_st* stream) {
  using C = Compute<typename Access::T>;
  const Grid grid{dim3(static_cast<unsigned>(plan.teams << plan.team.log_blocks)),
                  dim3(static_cast<unsigned>(plan.team.block_threads())), plan.team.blocks(),
                  plan.shared_bytes};
  const auto sums = static_cast<size_t>(plan.teams * p.columns * result_count(p));
  C* partial = static_cast<C*>(allocate(sums * sizeof(C)));
  const Status status = launch_overlapped(stream_rows<Access, kCentered, kAdds, kStages>, grid,
                                          stream, p, plan.team, partial);
  const columns::Plan columns{1, 1, 1, plan.teams, p.rows, p.columns};
  if (!status.ok() || result_count(p) == 0) return status;
  const Result weight{p.grad_weight, p.weight_dtype, 1};
  const Result bias{p.grad_bias, p.weight_dtype, 1};
  if (result_count(p) == 2)
    return columns::queue_finish(static_cast<const C*>(partial), columns, weight, &bias, stream);
  return columns::queue_finish(static_cast<const C*>(partial), columns,
                               p.grad_weight == nullptr ? bias : weight, nullptr, stream);
}

template <class Access>
Status launch_stream(const NormBackward& p, const StreamPlan& plan, Allocate allocate,
                     CUstream_st* stream) {
  const auto launch_centered = [&](auto centered) {
    const auto with_sum = [&](auto adds) {
      return plan.stages == 3 ? launch_stream<Access, centered, adds, 3>(p, plan, allocate, stream)
                              : launch_stream<Access, centered, adds, 2>(p, plan, allocate, stream);
    };
    return p.grad_sum == nullptr ? with_sum(std::false_type{}) : with_sum(std::true_type{});
  };
  return p.centered ? launch_centered(std::true_type{}) : launch_centered(std::false_type{});
}

}  // namespace
}  // namespace torchkiln::cuda
