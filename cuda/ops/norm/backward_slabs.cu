#include "backward_slabs.cuh"

#include "backward_finish.cuh"
#include "backward_slabs_kernel.cuh"

namespace torchkiln::cuda::norm_gradients {
namespace {

SlabRows slab_rows_of(const NormBackward& p, Alignment alignment) {
  return {{p.grad, p.z, p.grad_sum},
          {p.grad_row_stride, p.z_row_stride, p.grad_sum_row_stride},
          p.grad_sum == nullptr ? 2 : 3,
          p.rows,
          p.columns,
          p.dtype,
          alignment,
          16};
}

}  // namespace

bool prefers_slabs(const NormBackward& p, Alignment alignment, bool can_stream) {
  constexpr int64_t kKiB = 1 << 10;
  const int64_t bytes = p.columns * static_cast<int64_t>(size_of(p.dtype));
  const bool is_half = p.dtype != Dtype::float32;
  if (!can_stream || (is_half && p.centered && alignment != Alignment::vector))
    return bytes >= 3 * kKiB;
  if (alignment != Alignment::vector) return bytes >= (is_half ? 12 : 40) * kKiB;
  return bytes >= (p.grad_sum == nullptr ? 64 : 256) * kKiB;
}

SlabPlan plan_slabs(const NormBackward& p, Alignment alignment) {
  return norm_slabs::plan_slabs(slab_rows_of(p, alignment), p.grad_x != nullptr);
}

Status slabs(const NormBackward& p, Alignment alignment, const SlabPlan& plan, Allocate allocate,
             CUstream_st* stream) {
  float* exchange = nullptr;
  if (p.grad_x != nullptr) {
    const Status status =
        allocate_exchange(p.rows, p.centered ? 2 : 1, plan.blocks, allocate, stream, exchange);
    if (!status.ok()) return status;
  }
  const int chunks = plan.teams * plan.runs;
  float* const partial = chunks > 1 ? allocate_partials<float>(p, chunks, allocate) : nullptr;
  const SlabRows rows = slab_rows_of(p, alignment);
  const Grid grid = make_grid(plan, kSlabBlockThreads, p.grad_x != nullptr);
  const Status status = dispatch<float, __half, __nv_bfloat16>(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto launch = [&](auto lanes, auto centered, auto adds) {
      return launch_overlapped(slab_rows<T, lanes, centered, adds>, grid, stream, p, rows, plan,
                               exchange, partial);
    };
    const auto with_sum = [&](auto lanes, auto centered) {
      return p.grad_sum == nullptr ? launch(lanes, centered, std::false_type{})
                                   : launch(lanes, centered, std::true_type{});
    };
    const auto with_center = [&](auto lanes) {
      return p.centered ? with_sum(lanes, std::true_type{}) : with_sum(lanes, std::false_type{});
    };
    return plan.in_vectors ? with_center(std::integral_constant<int, kVectorLanes<T>>{})
                           : with_center(std::integral_constant<int, 1>{});
  });
  return status.ok() && chunks > 1 ? finish_partials(p, chunks, partial, stream) : status;
}

}  // namespace torchkiln::cuda::norm_gradients
