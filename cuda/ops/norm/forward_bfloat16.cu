#include "forward.cuh"

namespace torchkiln::cuda {

template Status norm_rows_of<__nv_bfloat16>(const Norm&, Alignment, Allocate, CUstream_st*);

}  // namespace torchkiln::cuda
