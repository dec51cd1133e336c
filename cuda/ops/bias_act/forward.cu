// out = activation(x * scale + bias). If the signs of the results suffice for backward, it also
// stores one bit per result. An elementwise kernel: forward.cuh has the bodies, forward_half.cu the
// kernels in half precision, backward.cu the gradients.

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
