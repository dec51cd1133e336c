#include "backward.cuh"

namespace torchkiln::cuda {

Status batch_norm_backward_rows(const BatchNormBackward& p, Allocate allocate,
                                CUstream_st* stream) {
  return launch_backward<true>(p, allocate, stream);
}

}  // namespace torchkiln::cuda
