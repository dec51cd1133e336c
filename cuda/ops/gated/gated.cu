// y = activation(gate) * up and its gradients, element by element: kernels of
// device/elementwise.cuh, one for each activation that a gate can have. with_output.cu has the
// backward that writes y again.

#include "torchkiln/kernels/gated.h"

#include "torchkiln/device/elementwise.cuh"

namespace torchkiln::cuda {

using namespace device;
Status gated(const Elementwise<2>& arguments, Activation activation, CUstream_st* stream) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return elementwise::launch_activated<T, T, T>(
        activation, elementwise::Make<Gated, MathFor<T>>{}, arguments, stream, Gates{});
  });
}

Status gated_backward(const Elementwise<3, 2>& arguments, Activation activation,
                      CUstream_st* stream) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return elementwise::launch_activated<T, T, T, T>(
        activation, elementwise::Make<GatedGradient, MathFor<T>>{}, arguments, stream, Gates{});
  });
}

}  // namespace torchkiln::cuda
