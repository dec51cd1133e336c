// y = activation(x), element by element. One kernel for each activation, and one for all of them
// that reads operands of any layout: see device/elementwise.cuh. backward.cu has the gradient.

#include "torchkiln/device/elementwise.cuh"
#include "torchkiln/kernels/activation.h"

namespace torchkiln::cuda {

using namespace device;

Status activation(const Elementwise<1>& arguments, Activation activation, CUstream_st* stream) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return elementwise::launch_activated<T, T>(
        activation, elementwise::Make<Activated, MathFor<T>>{}, arguments, stream);
  });
}

}  // namespace torchkiln::cuda
