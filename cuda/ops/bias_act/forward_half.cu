// The kernels of forward.cuh in half precision, in a file of their own because each of the two
// dtypes has biases of two dtypes.

#include "forward.cuh"

namespace torchkiln::cuda {

Status bias_act_in_half_precision(const BiasAct& p, CUstream_st* stream) {
  return dispatch<__half, __nv_bfloat16>(p.elements.dtype, [&](auto tag) {
    return forward_of<typename decltype(tag)::type>(p, stream);
  });
}

}  // namespace torchkiln::cuda
