#include "backward_few_rows.cuh"
#include "backward_streaming.cuh"
#include "backward_two_pass.cuh"

namespace torchkiln::cuda {

using namespace device;
using namespace rowwise;

Status norm_backward(const NormBackward& p, Allocate allocate, CUstream_st* stream) {
  if (p.rows == 0 || p.columns == 0) return {};
  if (p.columns > kMostColumns) return {kTooLong};
  const Alignment alignment = alignment_of(p);
  const bool is_few = are_few(p, alignment);
  const StreamPlan plan = is_few ? StreamPlan{} : plan_stream(p, alignment);
  return dispatch_floating(p.dtype, [&](auto tag) {
    return with_vectors<typename decltype(tag)::type>(alignment, [&](auto access) {
      using Access = typename decltype(access)::type;
      using T = typename Access::T;
      if constexpr (Access::kAligned && Access::kLanes > 1) {
        if (is_few) {
          return with_parameter_type<T>(p.weight_dtype, [&](auto parameter) {
            return launch_few_rows<Access, typename decltype(parameter)::type>(p, stream);
          });
        }
      }
      if constexpr (Access::kLanes > 1) {
        if (plan.teams > 0) return launch_stream<Access>(p, plan, allocate, stream);
      }
      // Too long a row, or it lies apart: where rows are not whole, all are read alike.
      using Read = std::conditional_t<Access::kAligned, Access, RowVectors<T, 1, true>>;
      return two_pass<Read>(p, allocate, stream);
    });
  });
}

}  // namespace torchkiln::cuda
