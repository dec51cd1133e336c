#include "PACKAGE/kernels/OPNAME.h"

#include "torchkiln/device/elementwise.cuh"

namespace PACKAGE::cuda {

using torchkiln::Compute;
using torchkiln::Elementwise;
using torchkiln::MathFor;
using torchkiln::Status;

Status OPNAME(const Elementwise<2>& arguments, double scale, CUstream_st* stream) {
  return torchkiln::device::dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    const OPNAME_parts::Formula<MathFor<T>, C> formula{static_cast<C>(scale)};
    return torchkiln::device::elementwise::launch<T, T, T>(formula, arguments, stream);
  });
}

Status OPNAME_backward(const Elementwise<3, 2>& arguments, double scale, CUstream_st* stream) {
  return torchkiln::device::dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    const OPNAME_parts::Gradients<MathFor<T>, C> gradients{static_cast<C>(scale)};
    return torchkiln::device::elementwise::launch<T, T, T, T>(gradients, arguments, stream);
  });
}

}  // namespace PACKAGE::cuda
