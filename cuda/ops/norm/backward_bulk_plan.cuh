#pragma once

// How the bulk gradients of norms distribute rows, and how many of them are in flight.

#include "backward_common.cuh"

namespace torchkiln::cuda::norm_gradients {

/// blocks is 0 if the kernel does not support the call.
struct BulkPlan {
  TeamShape team;
  int vectors;  // per thread and row
  int stages;   // rows of a team in shared memory or in flight
  int shared_bytes;
  int64_t blocks;
};

Status bulk(const NormBackward& p, const BulkPlan& plan, Allocate allocate, CUstream_st* stream);

namespace {

constexpr int kBulkThreads = 512;  // per block: 128 registers per thread
constexpr int kBulkWarps = kBulkThreads / kWarpLanes;
constexpr int kBulkVectors = 2;      // per thread and row
constexpr int kLongBulkVectors = 4;  // of rows above 16 KiB
constexpr int kMinBulkThreads = 64;
constexpr int kMaxBulkTeams = kBulkThreads / kMinBulkThreads;
constexpr int kMaxBulkStages = 4;
constexpr int kBulkBytesInFlight = 96 << 10;

BulkPlan plan_bulk(const NormBackward& p, Alignment alignment) {
  BulkPlan plan{};
  const Device device = current_device();
  const int64_t row_bytes = p.columns * static_cast<int64_t>(size_of(p.dtype));
  const int64_t vectors = row_bytes / kVectorBytes;
  const bool is_long = vectors > kBulkVectors * kBulkThreads;
  // 4 vectors per thread leave no registers for a third tensor or a second set of column sums.
  const int most = p.centered || p.grad_sum != nullptr ? kBulkVectors : kLongBulkVectors;
  if (!device.runs_90_code || alignment != Alignment::vector || p.dtype == Dtype::float64 ||
      p.grad_x == nullptr || vectors < kMinBulkThreads || vectors > most * kBulkThreads)
    return plan;
  plan.vectors = is_long ? kLongBulkVectors : kBulkVectors;
  const int64_t warps = ceil_div(ceil_div(vectors, plan.vectors), kWarpLanes);
  const int threads = std::max(static_cast<int>(warps) * kWarpLanes, kMinBulkThreads);
  // Fewer teams per block if that occupies more SMs.
  const int64_t rows_per_block = ceil_div(p.rows, device.multiprocessors);
  const int teams = static_cast<int>(std::min<int64_t>(kBulkThreads / threads, rows_per_block));
  plan.team = {threads, 31, 0, teams};
  const int tensors = p.grad_sum == nullptr ? 2 : 3;
  const int stage_bytes = static_cast<int>(row_bytes) * tensors * teams;
  plan.stages = std::clamp((kBulkBytesInFlight + stage_bytes - 1) / stage_bytes, 2, kMaxBulkStages);
  const int partial_bytes = teams > 1 ? teams * static_cast<int>(p.columns * sizeof(float)) : 0;
  const int weight_bytes =
      is_long ? threads * kLongBulkVectors * kVectorBytes / static_cast<int>(size_of(p.dtype)) * 4
              : 0;
  plan.shared_bytes = std::max(plan.stages * stage_bytes + weight_bytes, partial_bytes);
  plan.blocks = std::min<int64_t>(device.multiprocessors, ceil_div(p.rows, teams));
  return plan;
}

}  // namespace
}  // namespace torchkiln::cuda::norm_gradients
