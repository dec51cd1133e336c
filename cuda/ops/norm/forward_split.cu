#include "forward_split.cuh"

#include "forward_part.cuh"

namespace torchkiln::cuda {

Status split_norm(const Norm& p, Alignment alignment, Allocate allocate, CUstream_st* stream) {
  return dispatch_floating(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto launch = [&](auto tile) {
      using Tile = typename decltype(tile)::type;
      return p.centered
                 ? launch_in_parts<NormPart<Tile, true>, 3>(p, p.rows, p.columns, allocate, stream)
                 : launch_in_parts<NormPart<Tile, false>, 3>(p, p.rows, p.columns, allocate,
                                                             stream);
    };
    return alignment == Alignment::scalar ? launch(TypeTag<PartTile<T, 4, false>>{})
                                          : launch(TypeTag<PartTile<T, 8, true>>{});
  });
}

}  // namespace torchkiln::cuda
