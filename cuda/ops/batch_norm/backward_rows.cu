// The kernels of backward.cuh for adjacent channels, and for planes that are read as rows of all
// channels, in a file of their own to compile in parallel with the kernels for planes.

#include "backward.cuh"

namespace torchkiln::cuda {

Status sums_of_rows(const BatchNormBackward& p, const ChannelPass& pass, Allocate allocate,
                    CUstream_st* stream) {
  return launch_sums<true>(p, pass, allocate, stream);
}

Status input_gradients_of_rows(const BatchNormBackward& p, const ChannelPass& pass,
                               CUstream_st* stream) {
  return launch_input_gradients<true>(p, pass, stream);
}

}  // namespace torchkiln::cuda
