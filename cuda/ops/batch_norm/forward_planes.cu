// The kernels of forward.cuh for channels whose elements are adjacent in memory, in a file of their
// own so that they compile beside those for adjacent channels.

#include "forward.cuh"

namespace torchkiln::cuda {

Status moments_of_planes(const BatchNorm& p, Allocate allocate, CUstream_st* stream) {
  return launch_moments<false>(p, allocate, stream);
}

Status outputs_of_planes(const BatchNorm& p, CUstream_st* stream) {
  return launch_outputs<false>(p, stream);
}

}  // namespace torchkiln::cuda
