#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>

#include "../torch-ext/torch_binding.h"

// Declared here, because torch guards it by a macro of its own builds.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

using namespace OPNAME_parts;

namespace {

constexpr int kThreads = 256;

template <class C>
__device__ C sigmoid(C a) {
  return 1 / (1 + exp(-a));
}

template <class T>
__global__ void forward(const T* x, T* out, int64_t columns, int64_t count) {
  using C = typename Compute<T>::Type;
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (i >= count) return;
  const int64_t at = i + i / columns * columns;  // of the first half
  const C a = static_cast<C>(x[at]), b = static_cast<C>(x[at + columns]);
  out[i] = static_cast<T>(a * sigmoid(a) * b);
}

template <class T>
__global__ void backward(const T* grad, const T* x, T* out, int64_t columns, int64_t count) {
  using C = typename Compute<T>::Type;
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (i >= count) return;
  const int64_t at = i + i / columns * columns;
  const C a = static_cast<C>(x[at]), b = static_cast<C>(x[at + columns]);
  const C g = static_cast<C>(grad[i]), s = sigmoid(a);
  out[at] = static_cast<T>(g * b * s * (1 + a * (1 - s)));
  out[at + columns] = static_cast<T>(g * a * s);
}

/// Calls body(type, blocks, stream) on the device of x, if there are elements.
template <class Body>
void launch(const Tensor& x, int64_t count, const Body& body) {
  if (count == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
  const auto blocks = static_cast<unsigned>((count + kThreads - 1) / kThreads);
  with_type(x, [&](auto type) { body(type, blocks, static_cast<cudaStream_t>(stream)); });
  STD_TORCH_CHECK(cudaGetLastError() == cudaSuccess, "OPNAME: the launch failed");
}

}  // namespace

Tensor OPNAME_forward(const Tensor& x) {
  check_input(x);
  Tensor out = empty_half(x);
  launch(x, out.numel(), [&](auto type, unsigned blocks, cudaStream_t stream) {
    using T = decltype(type);
    forward<T><<<blocks, kThreads, 0, stream>>>(static_cast<const T*>(x.data_ptr()),
                                                static_cast<T*>(out.data_ptr()), x.size(-1) / 2,
                                                out.numel());
  });
  return out;
}

Tensor OPNAME_backward(const Tensor& grad, const Tensor& x) {
  check_gradient(grad, x);
  Tensor out = torch::stable::empty_like(x);
  launch(x, grad.numel(), [&](auto type, unsigned blocks, cudaStream_t stream) {
    using T = decltype(type);
    backward<T><<<blocks, kThreads, 0, stream>>>(
        static_cast<const T*>(grad.data_ptr()), static_cast<const T*>(x.data_ptr()),
        static_cast<T*>(out.data_ptr()), x.size(-1) / 2, grad.numel());
  });
  return out;
}
