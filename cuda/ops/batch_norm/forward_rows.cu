#include "forward.cuh"

namespace torchkiln::cuda {

Status batch_norm_rows(const BatchNorm& p, Allocate allocate, CUstream_st* stream) {
  return launch_forward<true>(p, allocate, stream);
}

}  // namespace torchkiln::cuda
