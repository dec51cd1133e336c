#include "backward.cuh"

namespace torchkiln::cuda {

template Status gated_norm_gradients_of<__half>(const GatedNormBackward&, Alignment, Allocate,
                                                CUstream_st*);

}  // namespace torchkiln::cuda
