#include "forward_slabs.cuh"

#include <limits>

#include "forward_slabs_kernel.cuh"

namespace torchkiln::cuda {
namespace {

SlabRows slab_rows_of(const Norm& p, Alignment alignment) {
  return {{p.x, p.residual, nullptr},
          {p.x_row_stride, p.residual_row_stride, 0},
          p.residual == nullptr ? 1 : 2,
          p.rows,
          p.columns,
          p.dtype,
          alignment,
          2};
}

/// Rows of fewer bytes are faster in the registers of a team, which reads weight and bias again for
/// each row. Measured on an H100.
int64_t fewest_bytes(const Norm& p, Alignment alignment) {
  constexpr int64_t kKiB = 1 << 10;
  constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
  const bool adds = p.residual != nullptr;
  const bool is_half = p.dtype != Dtype::float32;
  if (alignment == Alignment::scalar) return (is_half ? 7 : 16) * kKiB;
  if (is_half && !p.centered) return kNever;
  if (alignment == Alignment::shared_offset) return (is_half ? 64 : adds ? 128 : 32) * kKiB;
  if (adds || !p.centered) return 256 * kKiB;
  return (is_half ? 128 : 64) * kKiB;
}

}  // namespace

SlabPlan plan_norm_slabs(const Norm& p, Alignment alignment) {
  const int64_t bytes = p.columns * static_cast<int64_t>(size_of(p.dtype));
  if (p.residual_dtype != p.dtype || bytes <= fewest_bytes(p, alignment)) return {};
  const SlabPlan plan = plan_slabs(slab_rows_of(p, alignment), true);
  // A team begins with an empty ring.
  constexpr int64_t kFewestRowsOfTeam = 8;
  return p.rows < kFewestRowsOfTeam * plan.teams ? SlabPlan{} : plan;
}

Status norm_in_slabs(const Norm& p, Alignment alignment, const SlabPlan& plan, Allocate allocate,
                     CUstream_st* stream) {
  float* exchange = nullptr;
  const Status status = allocate_exchange(p.rows, p.centered ? kMoments<true> : kMoments<false>,
                                          plan.blocks, allocate, stream, exchange);
  if (!status.ok()) return status;
  const Grid grid = make_grid(plan, kSlabBlockThreads, true);
  const SlabRows rows = slab_rows_of(p, alignment);
  return dispatch<float, __half, __nv_bfloat16>(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto launch = [&](auto kernel) {
      return launch_overlapped(kernel, grid, stream, p, rows, plan, exchange);
    };
    const auto with_sum = [&](auto lanes, auto centered) {
      return p.residual == nullptr ? launch(norm_slab_rows<T, lanes, centered, false>)
                                   : launch(norm_slab_rows<T, lanes, centered, true>);
    };
    const auto with_center = [&](auto lanes) {
      return p.centered ? with_sum(lanes, std::true_type{}) : with_sum(lanes, std::false_type{});
    };
    return plan.in_vectors ? with_center(std::integral_constant<int, kVectorLanes<T>>{})
                           : with_center(std::integral_constant<int, 1>{});
  });
}

}  // namespace torchkiln::cuda
