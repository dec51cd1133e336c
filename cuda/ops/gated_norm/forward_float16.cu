#include "forward.cuh"

namespace torchkiln::cuda {

template Status gated_norm_of<__half>(const GatedNorm&, Alignment, CUstream_st*);

}  // namespace torchkiln::cuda
