#include "backward_slabs.cuh"

#include "backward_finish.cuh"
#include "backward_slabs_kernel.cuh"

namespace torchkiln::cuda::norm_gradients {

bool prefers_slabs(const NormBackward& p, Alignment alignment, bool can_stream) {
  const int64_t bytes = p.columns * static_cast<int64_t>(size_of(p.dtype));
  if (!can_stream) return bytes >= 3 << 10;
  if (alignment == Alignment::vector) return bytes >= (p.grad_sum == nullptr ? 64 : 256) << 10;
  return bytes >= (p.dtype == Dtype::float32 ? 64 : 16) << 10;
}

SlabPlan plan_slabs(const NormBackward& p, Alignment alignment) {
  SlabPlan plan{};
  const Device device = current_device();
  if (!device.runs_90_code || p.dtype == Dtype::float64) return plan;
  const int size = static_cast<int>(size_of(p.dtype));
  const int64_t resident = int64_t{device.multiprocessors} * kSlabBlocks;
  const int most_columns = kSlabThreads * kSlabBytes / size;
  const int64_t least = ceil_div(p.columns, most_columns);
  if (least > std::min<int64_t>(resident, kMaxTeamBlocks)) return plan;
  plan.teams = std::min(resident / least, p.rows);
  // Slabs of whole vectors, as equal as possible, and not too short.
  const int lanes = kVectorBytes / size;
  const int64_t most = std::max(least, ceil_div(p.columns, lanes * kMinSlab));
  const int64_t blocks = std::min({resident / plan.teams, most, int64_t{kMaxTeamBlocks}});
  const int64_t columns = ceil_div(ceil_div(p.columns, blocks), lanes) * lanes;
  plan.columns = static_cast<int>(std::min<int64_t>(columns, most_columns));
  plan.blocks = static_cast<int>(ceil_div(p.columns, plan.columns));
  plan.tensor_bytes = plan.columns * size;
  if (alignment != Alignment::vector) plan.tensor_bytes += kVectorBytes;
  const int tensors = p.grad_sum == nullptr ? 2 : 3;
  constexpr int kReserved = 3 << 10;  // static shared memory, and what the system takes
  const int most_bytes = device.shared_bytes / kSlabBlocks - kReserved;
  plan.stages = std::min(most_bytes / (tensors * plan.tensor_bytes), kMaxSlabStages);
  // The lag is at most stages - 2: a row is copied once that before the lag has been written.
  constexpr int kFewestStages = 4;
  if (plan.stages < kFewestStages) return SlabPlan{};
  plan.lag = (plan.stages + 1) / 2;
  if (p.grad_x == nullptr) plan.lag = 0;
  plan.shared_bytes = plan.stages * tensors * plan.tensor_bytes;
  return plan;
}

Status slabs(const NormBackward& p, Alignment alignment, const SlabPlan& plan, Allocate allocate,
             CUstream_st* stream) {
  float* exchange = nullptr;
  if (p.grad_x != nullptr) {
    const Status status =
        allocate_exchange(p.rows, p.centered ? 2 : 1, plan.blocks, allocate, stream, exchange);
    if (!status.ok()) return status;
  }
  float* const partial =
      plan.teams > 1 ? allocate_partials<float>(p, plan.teams, allocate) : nullptr;
  Grid grid{dim3(static_cast<unsigned>(plan.blocks), static_cast<unsigned>(plan.teams)),
            dim3(kSlabBlockThreads), 1, plan.shared_bytes};
  grid.cooperative = plan.blocks > 1 && p.grad_x != nullptr;  // blocks wait for each other
  const Status status = dispatch<float, __half, __nv_bfloat16>(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto launch = [&](auto lanes, auto centered, auto adds) {
      return launch_overlapped(slab_rows<T, lanes, centered, adds>, grid, stream, p, plan, exchange,
                               partial);
    };
    const auto with_sum = [&](auto lanes, auto centered) {
      return p.grad_sum == nullptr ? launch(lanes, centered, std::false_type{})
                                   : launch(lanes, centered, std::true_type{});
    };
    const auto with_center = [&](auto lanes) {
      return p.centered ? with_sum(lanes, std::true_type{}) : with_sum(lanes, std::false_type{});
    };
    return alignment == Alignment::vector
               ? with_center(std::integral_constant<int, kVectorLanes<T>>{})
               : with_center(std::integral_constant<int, 1>{});
  });
  return status.ok() && plan.teams > 1 ? finish_partials(p, plan.teams, partial, stream) : status;
}

}  // namespace torchkiln::cuda::norm_gradients
