// The kernels of backward.cuh for channels whose elements are adjacent in memory, in a file of
// their own to compile in parallel with the kernels for adjacent channels.

#include "backward.cuh"

namespace torchkiln::cuda {

Status sums_of_planes(const BatchNormBackward& p, const ChannelPass& pass, Allocate allocate,
                      CUstream_st* stream) {
  return launch_sums<false>(p, pass, allocate, stream);
}

Status input_gradients_of_planes(const BatchNormBackward& p, const ChannelPass& pass,
                                 CUstream_st* stream) {
  return launch_input_gradients<false>(p, pass, stream);
}

}  // namespace torchkiln::cuda
