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
    using T = typename decltype(tag)::type;
    return with_access<T>(kind, [&](auto access) {
      using Access = typename decltype(access)::type;
      const auto start = [&](auto weight) {
        using W = typename decltype(weight)::type;
        if constexpr (Access::kWhole && Access::kLanes > 1) {
          if (is_few) return few<Access, W>(p, stream);
        }
        if constexpr (Access::kLanes > 1) {
          if (walk.teams > 0) return walked<Access, W>(p, walk, stream);
        }
        return unwalked<Access, W>(p, stream);
      };
      // float32 parameters stand beside half precision alone.
      if constexpr (sizeof(T) == 2) {
        if (p.weight_dtype != p.dtype) return start(TypeTag<float>{});
      }
      return start(TypeTag<T>{});
    });
  });
}

}  // namespace torchkiln::cuda
