// grad_x = grad * activation'(saved), element by element, with the tensor that the forward has
// saved, x or y. The kernels are those of device/elementwise.cuh, as in forward.cu.

#include "torchkiln/device/elementwise.cuh"
#include "torchkiln/kernels/activation.h"

namespace torchkiln::cuda {

using namespace device;

Status activation_backward(const Elementwise<2>& arguments, Activation activation,
                           CUstream_st* stream) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return elementwise::launch_activated<T, T, T>(
        activation, elementwise::Make<ActivatedGradient, MathFor<T>>{}, arguments, stream);
  });
}

}  // namespace torchkiln::cuda
