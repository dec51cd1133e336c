// The backward of a gate that also writes y, so that forward need not save y.

#include "torchkiln/device/elementwise.cuh"
#include "torchkiln/kernels/gated.h"

namespace torchkiln::cuda {

using namespace device;

/// Operands are the halves of packed rows. One kernel selects the activation at run time, as the
/// kernels that read such rows in vectors do.
Status gated_backward_with_output(const Elementwise<3, 3>& arguments, Activation activation,
                                  CUstream_st* stream) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using Make = elementwise::Make<GatedGradientAndValue, MathFor<T>>;
    const elementwise::Switched<Make, Gates> body{activation, {}};
    return elementwise::launch_bodies<T, T, T, T>(body, body, arguments, stream);
  });
}

}  // namespace torchkiln::cuda
