// The kernels of forward.cuh for channels whose elements are adjacent in memory, in a file of their
// own to compile in parallel with the kernels for adjacent channels.

#include "forward.cuh"

namespace torchkiln::cuda {

Status moments_of_planes(const BatchNorm& p, const ChannelPass& pass, Allocate allocate,
                         CUstream_st* stream) {
  return launch_moments<false>(p, pass, allocate, stream);
}

Status outputs_of_planes(const BatchNorm& p, const ChannelPass& pass, CUstream_st* stream) {
  return launch_outputs<false>(p, pass, stream);
}

}  // namespace torchkiln::cuda
