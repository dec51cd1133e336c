#include "forward.cuh"

namespace torchkiln::cuda {

Status moments_of_planes(const BatchNorm& p, Allocate allocate, CUstream_st* stream) {
  return launch_moments<false>(p, allocate, stream);
}

Status outputs_of_planes(const BatchNorm& p, CUstream_st* stream) {
  return launch_outputs<false>(p, stream);
}

}  // namespace torchkiln::cuda
