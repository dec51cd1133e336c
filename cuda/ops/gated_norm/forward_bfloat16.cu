#include "forward.cuh"

namespace torchkiln::cuda {

template Status gated_norm_of<__nv_bfloat16>(const GatedNorm&, Alignment, CUstream_st*);

}  // namespace torchkiln::cuda
