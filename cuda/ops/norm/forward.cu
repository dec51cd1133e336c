#include "launch.cuh"
#include "torchkiln/device/launch.cuh"
#include "torchkiln/device/vec.cuh"

namespace torchkiln::cuda {
namespace {

Status launch(const Norm& p, const OnePassPlan& plan, Allocate, CUstream_st* stream) {
  return dispatch_floating(p.dtype, [&](auto tag) {
    return NormForwardByDtype<typename decltype(tag)::type>::launch(p, plan, stream);
  });
}

}  // namespace

Status norm(const Norm& p, Allocate allocate, CUstream_st* stream) {
  if (p.rows == 0 || p.columns == 0) return {};
  if (p.columns > kMaxColumns) return {kTooLong};
  const NormPlan plan = choose(p, alignment_of_rows(p), current_device());
  return std::visit([&](const auto& chosen) { return launch(p, chosen, allocate, stream); }, plan);
}

}  // namespace torchkiln::cuda
