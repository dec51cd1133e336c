// Tiles of a matrix in memory, in E4M3, in both orientations.

#include "tiles.cuh"

#include "kernels.cuh"

namespace torchkiln::fp8 {
namespace {

template <class Source, bool square, bool rows>
Status launch_as(const Quantize& p, bool aligned, cudaStream_t stream) {
  const FromMemory<Source> reader;
  return aligned ? launch_tiles_of<square, rows, true>(reader, p, stream)
                 : launch_tiles_of<square, rows, false>(reader, p, stream);
}

}  // namespace

Status launch_tiles(const Quantize& p, bool aligned, cudaStream_t stream) {
  if (p.x_scale != nullptr) return launch_as<Fp8, false, false>(p, aligned, stream);
  return dispatch<float, __half, __nv_bfloat16>(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return p.square ? launch_as<T, true, true>(p, aligned, stream)
                    : launch_as<T, false, true>(p, aligned, stream);
  });
}

}  // namespace torchkiln::fp8
