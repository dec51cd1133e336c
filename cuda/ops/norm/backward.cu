#include "launch.cuh"
#include "torchkiln/device/launch.cuh"
#include "torchkiln/device/vec.cuh"

namespace torchkiln::cuda {
namespace norm_gradients {
namespace {

Status launch(const NormBackward& p, const StreamPlan& plan, Allocate allocate,
              CUstream_st* stream) {
  return dispatch_floating(p.dtype, [&](auto tag) {
    return NormBackwardByDtype<typename decltype(tag)::type>::launch(p, plan, allocate, stream);
  });
}

Status launch_chosen(const NormBackward& p, Allocate allocate, CUstream_st* stream) {
  const GradientPlan plan = choose(p, alignment_of_rows(p), current_device());
  return std::visit([&](const auto& chosen) { return launch(p, chosen, allocate, stream); }, plan);
}

}  // namespace
}  // namespace norm_gradients

Status norm_backward(const NormBackward& p, Allocate allocate, CUstream_st* stream) {
  if (p.rows == 0 || p.columns == 0) return {};
  if (p.columns > kMaxColumns) return {kTooLong};
  return norm_gradients::launch_chosen(p, allocate, stream);
}

}  // namespace torchkiln::cuda
