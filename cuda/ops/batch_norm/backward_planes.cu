#include "backward.cuh"

namespace torchkiln::cuda {

Status batch_norm_backward_planes(const BatchNormBackward& p, Allocate allocate,
                                  CUstream_st* stream) {
  return launch_backward<false>(p, allocate, stream);
}

}  // namespace torchkiln::cuda
