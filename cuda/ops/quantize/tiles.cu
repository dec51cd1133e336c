// Quantises tiles of a matrix in memory to E4M3, in both orientations.

#include "tiles.cuh"

#include "kernels.cuh"

namespace torchkiln::fp8 {
namespace {

template <class Source, Scales scales, bool rows>
Status launch_as(const Quantize& p, bool aligned, cudaStream_t stream) {
  const FromMemory<Source> reader;
  return aligned ? launch_tiles_of<scales, rows, true>(reader, p, stream)
                 : launch_tiles_of<scales, rows, false>(reader, p, stream);
}

}  // namespace

Status launch_tiles(const Quantize& p, bool aligned, cudaStream_t stream) {
  if (p.x_scale != nullptr)
    return p.transposed_square ? launch_as<Fp8, Scales::turned_squares, false>(p, aligned, stream)
                               : launch_as<Fp8, Scales::rows, false>(p, aligned, stream);
  return dispatch<float, __half, __nv_bfloat16>(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (p.square) return launch_as<T, Scales::squares, true>(p, aligned, stream);
    return p.transposed_square ? launch_as<T, Scales::turned_squares, true>(p, aligned, stream)
                               : launch_as<T, Scales::rows, true>(p, aligned, stream);
  });
}

}  // namespace torchkiln::fp8
