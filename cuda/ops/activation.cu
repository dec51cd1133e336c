#include "torchkiln/kernels/activation.h"

#include "torchkiln/device/elementwise.cuh"

namespace torchkiln::cuda {

using namespace device;
Status activation(const Elementwise<1>& arguments, Activation activation, CUstream_st* stream) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return elementwise::launch_activated<T, T>(
        activation, elementwise::Make<Activated, MathFor<T>>{}, arguments, stream);
  });
}

Status activation_backward(const Elementwise<2>& arguments, Activation activation,
                           CUstream_st* stream) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return elementwise::launch_activated<T, T, T>(
        activation, elementwise::Make<ActivatedGradient, MathFor<T>>{}, arguments, stream);
  });
}

}  // namespace torchkiln::cuda
