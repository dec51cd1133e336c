// Sums, products and scaled copies of tensors, element by element, for the layers above: the
// kernels of device/elementwise.cuh with the functors of core/functors.h.

#include "torchkiln/kernels/pointwise.h"

#include "torchkiln/device/elementwise.cuh"

namespace torchkiln::cuda {

using namespace device;

Status add(const Elementwise<2>& arguments, CUstream_st* stream) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return elementwise::launch<T, T, T>(Add{}, arguments, stream);
  });
}

Status multiply_add(const Elementwise<3>& arguments, CUstream_st* stream) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return elementwise::launch<T, T, T, T>(MultiplyAdd{}, arguments, stream);
  });
}

Status scale_add(const Elementwise<2>& arguments, double factor, CUstream_st* stream) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    return elementwise::launch<T, T, T>(ScaleAdd<C>{static_cast<C>(factor)}, arguments, stream);
  });
}

Status multiply_shift(const Elementwise<2>& arguments, double shift, CUstream_st* stream) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    return elementwise::launch<T, T, T>(MultiplyShift<C>{static_cast<C>(shift)}, arguments, stream);
  });
}

Status scale_by(const Elementwise<1>& arguments, const void* factor, const void* divisor,
                CUstream_st* stream) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    const ScaleBy<C> functor{static_cast<const C*>(factor), static_cast<const C*>(divisor)};
    if constexpr (sizeof(T) == 2) {
      if (arguments.in_dtype[0] == Dtype::float32)
        return elementwise::launch<T, float>(functor, arguments, stream);
    }
    return elementwise::launch<T, T>(functor, arguments, stream);
  });
}

Status scale_shift(const Elementwise<1>& arguments, double factor, double shift,
                   CUstream_st* stream) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    const ScaleShift<C> functor{static_cast<C>(factor), static_cast<C>(shift)};
    return elementwise::launch<T, T>(functor, arguments, stream);
  });
}

Status multiply_gradient(const Elementwise<3, 2>& arguments, CUstream_st* stream) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return elementwise::launch<T, T, T, T>(MultiplyGradient{}, arguments, stream);
  });
}

}  // namespace torchkiln::cuda
