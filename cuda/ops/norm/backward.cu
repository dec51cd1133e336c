#include "backward_few_rows.cuh"
#include "backward_streaming.cuh"
#include "backward_two_pass.cuh"

namespace torchkiln::cuda {

using namespace device;
using namespace rowwise;

Status norm_backward(const NormBackward& p, Allocate allocate, CUstream_st* stream) {
  if (p.rows == 0 || p.columns == 0) return {};
  if (p.columns > kMaxColumns) return {kTooLong};
  const Alignment alignment = backward_alignment(p);
  const bool few_rows = has_few_rows(p, alignment);
  const StreamPlan plan = few_rows ? StreamPlan{} : plan_stream(p, alignment);
  return dispatch_floating(p.dtype, [&](auto tag) {
    return with_vectors<typename decltype(tag)::type>(alignment, [&](auto access) {
      using Access = typename decltype(access)::type;
      using T = typename Access::T;
      if constexpr (Access::kAligned && Access::kLanes > 1) {
        if (few_rows) {
          return with_parameter_type<T>(p.weight_dtype, [&](auto parameter) {
            return launch_few_rows<Access, typename decltype(parameter)::type>(p, stream);
          });
        }
      }
      if constexpr (Access::kLanes > 1) {
        if (plan.teams > 0) return launch_stream<Access>(p, plan, allocate, stream);
      }
      // Rows that are too long for a cluster, or whose offsets differ. Unaligned rows are read
      // element by element, whether or not they share an offset.
      using Read = std::conditional_t<Access::kAligned, Access, RowVectors<T, 1, true>>;
      return two_pass<Read>(p, allocate, stream);
    });
  });
}

}  // namespace torchkiln::cuda
