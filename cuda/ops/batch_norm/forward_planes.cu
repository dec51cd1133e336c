#include "forward.cuh"

namespace torchkiln::cuda {

Status batch_norm_planes(const BatchNorm& p, Allocate allocate, CUstream_st* stream) {
  return launch_forward<false>(p, allocate, stream);
}

}  // namespace torchkiln::cuda
