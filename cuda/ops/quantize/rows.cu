// Quantises the rows of a matrix in memory to E4M3.

#include "rows.cuh"

#include "kernels.cuh"

namespace torchkiln::fp8 {

Status launch_rows(const Quantize& p, bool aligned, cudaStream_t stream) {
  return dispatch<float, __half, __nv_bfloat16>(p.dtype, [&](auto tag) {
    const FromMemory<typename decltype(tag)::type> reader;
    return aligned ? launch_rows_of<true>(reader, p, stream)
                   : launch_rows_of<false>(reader, p, stream);
  });
}

}  // namespace torchkiln::fp8
