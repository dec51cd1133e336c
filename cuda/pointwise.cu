#include "torchkiln/kernels/pointwise.h"

#include "torchkiln/elementwise.cuh"
#include "torchkiln/functors.h"

namespace torchkiln::cuda {

Status add(const Elementwise<2>& arguments, CUstream_st* stream) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return elementwise::launch<T, T, T>(Add{}, arguments, stream);
  });
}

}  // namespace torchkiln::cuda
