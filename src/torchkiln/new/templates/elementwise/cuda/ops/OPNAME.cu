#include "PACKAGE/kernels/OPNAME.h"

#include "torchkiln/device/elementwise.cuh"

namespace PACKAGE::cuda {

using namespace torchkiln;
using namespace torchkiln::device;

// elementwise::launch<Out, In...>() picks the access by the layout of the tensors: 16-byte vectors,
// rows that repeat, transposed tiles, or single elements.
Status OPNAME(const Elementwise<2>& arguments, double scale, CUstream_st* stream) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;  // float, double, __half or __nv_bfloat16
    using C = Compute<T>;
    const OPNAME_parts::Formula<MathFor<T>, C> formula{static_cast<C>(scale)};
    return elementwise::launch<T, T, T>(formula, arguments, stream);
  });
}

Status OPNAME_backward(const Elementwise<3, 2>& arguments, double scale, CUstream_st* stream) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    const OPNAME_parts::Gradients<MathFor<T>, C> gradients{static_cast<C>(scale)};
    return elementwise::launch<T, T, T, T>(gradients, arguments, stream);
  });
}

}  // namespace PACKAGE::cuda
