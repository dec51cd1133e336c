#include "forward.cuh"

namespace torchkiln::cuda {

Status bias_act(const BiasAct& p, CUstream_st* stream) {
  switch (p.elements.dtype) {
    case Dtype::float32:
      return forward_of<float>(p, stream);
    case Dtype::float64:
      return forward_of<double>(p, stream);
    default:
      return bias_act_in_half_precision(p, stream);
  }
}

}  // namespace torchkiln::cuda
