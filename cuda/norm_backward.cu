#include "norm_backward_apart.cuh"
#include "norm_backward_few.cuh"
#include "norm_backward_walk.cuh"

namespace torchkiln::cuda {

size_t workspace_bytes(const NormBackward& p) {
  if (p.rows == 0 || p.columns == 0 || are_few(p, kind_of(p))) return 0;
  const Walk walk = walk_of(p);
  if (walk.teams == 0) return parts_of(p).end;
  return static_cast<size_t>(walk.teams * p.columns * outputs(p)) * sum_bytes(p);
}

Status norm_backward(const NormBackward& p, CUstream_st* stream) {
  if (p.rows == 0 || p.columns == 0) return {};
  if (p.columns > kMostColumns) return {kTooLong};
  const RowKind kind = kind_of(p);
  const bool is_few = are_few(p, kind);
  const Walk walk = is_few ? Walk{} : walk_of(p);
  return dispatch_floating(p.dtype, [&](auto tag) {
    return with_access<typename decltype(tag)::type>(kind, [&](auto access) {
      using Access = typename decltype(access)::type;
      using T = typename Access::T;
      if constexpr (Access::kWhole && Access::kLanes > 1) {
        if (is_few) {
          return with_parameter_type<T>(p.weight_dtype, [&](auto parameter) {
            return few<Access, typename decltype(parameter)::type>(p, stream);
          });
        }
      }
      if constexpr (Access::kLanes > 1) {
        if (walk.teams > 0) return walked<Access>(p, walk, stream);
      }
      // Too long a row, or it lies apart: where rows are not whole, all are read alike.
      using Read = std::conditional_t<Access::kWhole, Access, RowAccess<T, 1, true>>;
      return unwalked<Read>(p, stream);
    });
  });
}

}  // namespace torchkiln::cuda
