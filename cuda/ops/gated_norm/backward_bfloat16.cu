#include "backward.cuh"

namespace torchkiln::cuda {

template Status gated_norm_gradients_of<__nv_bfloat16>(const GatedNormBackward&, Alignment,
                                                       Allocate, CUstream_st*);

}  // namespace torchkiln::cuda
