// grad_x = grad * activation'(saved), element by element. `saved` is the tensor that the forward
// saved, x or y. For mlp(), which does not save y, a second kernel computes both grad_x and y from
// x. The kernels are those of device/elementwise.cuh, as in forward.cu.

#include "torchkiln/device/elementwise.cuh"
#include "torchkiln/kernels/activation.h"

namespace torchkiln::cuda {

using namespace device;
namespace {

/// The body of the kernel with two outputs: the gradient of activation(x), and activation(x), from
/// x.
template <class Act, class Math>
struct GradientAndValue {
  template <class C>
  __device__ __forceinline__ Pair<C> operator()(C grad, C x) const {
    return {gradient_from_input<Act, Math>(grad, x), Act::template value<Math>(x)};
  }
};

}  // namespace

Status activation_backward(const Elementwise<2>& arguments, Activation activation,
                           CUstream_st* stream) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return elementwise::launch_activated<T, T, T>(
        activation, elementwise::Make<ActivatedGradient, MathFor<T>>{}, arguments, stream);
  });
}

/// One kernel for all activations selects one at run time, as in gated/with_output.cu.
Status activation_backward_with_output(const Elementwise<2, 2>& arguments, Activation activation,
                                       CUstream_st* stream) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using Make = elementwise::Make<GradientAndValue, MathFor<T>>;
    const elementwise::Switched<Make, Activations> body{activation, {}};
    return elementwise::launch_bodies<T, T, T>(body, body, arguments, stream);
  });
}

}  // namespace torchkiln::cuda
