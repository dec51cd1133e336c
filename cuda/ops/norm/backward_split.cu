// Gradients of rows that no other plan supports: the launch, and the choice between teams of
// several blocks and teams of one block. backward_split_kernel.cuh has the kernel,
// backward_split_columns.cuh its column sums.

#include "backward_finish.cuh"
#include "backward_split_kernel.cuh"

namespace torchkiln::cuda::norm_gradients {
namespace {

template <class T>
Status launch_split(const NormBackward& p, const GridPlan& plan, Allocate allocate,
                    CUstream_st* stream) {
  using C = Compute<T>;
  const bool is_split = plan.blocks > 1;
  C* exchange = nullptr;
  if (is_split && p.grad_x != nullptr) {
    const Status status =
        allocate_exchange(p.rows, p.centered ? 2 : 1, plan.blocks, allocate, stream, exchange);
    if (!status.ok()) return status;
  }
  const Grid grid = make_grid(plan);
  C* const partial = allocate_partials<C>(p, plan.teams, allocate);
  const auto launch = [&](auto kernel) {
    return launch_overlapped(kernel, grid, stream, p, plan, exchange, partial);
  };
  const auto launch_centered = [&](auto centered) {
    return is_split ? launch(split_rows<T, centered, true>)
                    : launch(split_rows<T, centered, false>);
  };
  const Status status =
      p.centered ? launch_centered(std::true_type{}) : launch_centered(std::false_type{});
  // A single team has written the gradients itself.
  return status.ok() && plan.teams > 1 ? finish_partials(p, plan.teams, partial, stream) : status;
}

}  // namespace

Status launch(const NormBackward& p, const SplitGradientsPlan& plan, Allocate allocate,
              CUstream_st* stream) {
  return dispatch_floating(p.dtype, [&](auto tag) {
    return launch_split<typename decltype(tag)::type>(p, plan.grid, allocate, stream);
  });
}

}  // namespace torchkiln::cuda::norm_gradients
