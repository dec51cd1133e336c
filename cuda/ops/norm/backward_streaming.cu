// float32 and float64; half precision is compiled in files of its own, to keep each below 15 s.

#include "backward_streaming.cuh"

namespace torchkiln::cuda::norm_gradients {

template Status stream<float>(const NormBackward&, Alignment, const StreamPlan&, Allocate,
                              CUstream_st*);
template Status stream<double>(const NormBackward&, Alignment, const StreamPlan&, Allocate,
                               CUstream_st*);

}  // namespace torchkiln::cuda::norm_gradients
