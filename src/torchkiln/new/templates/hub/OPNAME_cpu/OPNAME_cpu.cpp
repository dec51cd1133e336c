#include <cmath>

#include "../torch-ext/torch_binding.h"

using namespace OPNAME_parts;

Tensor OPNAME_forward(const Tensor& x) {
  check_input(x);
  Tensor out = empty_half(x);
  const int64_t columns = x.size(-1) / 2;
  with_type(x, [&](auto type) {
    using T = decltype(type);
    using C = typename Compute<T>::Type;
    const T* in = static_cast<const T*>(x.data_ptr());
    T* to = static_cast<T*>(out.data_ptr());
    for (int64_t i = 0; i < out.numel(); ++i) {
      const int64_t at = i + i / columns * columns;  // of the first half
      const C a = static_cast<C>(in[at]), b = static_cast<C>(in[at + columns]);
      to[i] = static_cast<T>(a / (1 + std::exp(-a)) * b);
    }
  });
  return out;
}

Tensor OPNAME_backward(const Tensor& grad, const Tensor& x) {
  check_gradient(grad, x);
  Tensor out = torch::stable::empty_like(x);
  const int64_t columns = x.size(-1) / 2;
  with_type(x, [&](auto type) {
    using T = decltype(type);
    using C = typename Compute<T>::Type;
    const T* in = static_cast<const T*>(x.data_ptr());
    const T* incoming = static_cast<const T*>(grad.data_ptr());
    T* to = static_cast<T*>(out.data_ptr());
    for (int64_t i = 0; i < grad.numel(); ++i) {
      const int64_t at = i + i / columns * columns;
      const C a = static_cast<C>(in[at]), b = static_cast<C>(in[at + columns]);
      const C g = static_cast<C>(incoming[i]), sigmoid = 1 / (1 + std::exp(-a));
      to[at] = static_cast<T>(g * b * sigmoid * (1 + a * (1 - sigmoid)));
      to[at + columns] = static_cast<T>(g * a * sigmoid);
    }
  });
  return out;
}
