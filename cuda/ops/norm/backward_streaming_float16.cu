#include "backward_streaming.cuh"

namespace torchkiln::cuda::norm_gradients {

template Status stream<__half>(const NormBackward&, Alignment, const StreamPlan&, Allocate,
                               CUstream_st*);

}  // namespace torchkiln::cuda::norm_gradients
