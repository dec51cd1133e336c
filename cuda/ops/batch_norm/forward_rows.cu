// The kernels of forward.cuh for adjacent channels, and for planes that are read as rows of all
// channels, in a file of their own to compile in parallel with the kernels for planes.

#include "forward.cuh"

namespace torchkiln::cuda {

Status moments_of_rows(const BatchNorm& p, const ChannelPass& pass, Allocate allocate,
                       CUstream_st* stream) {
  return launch_moments<true>(p, pass, allocate, stream);
}

Status outputs_of_rows(const BatchNorm& p, const ChannelPass& pass, CUstream_st* stream) {
  return launch_outputs<true>(p, pass, stream);
}

}  // namespace torchkiln::cuda
