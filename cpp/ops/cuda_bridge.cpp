// libtorchkiln_cuda: the only library of torchkiln that links torch's CUDA libraries. It passes two
// functions, TorchCuda, to the library with cuda_loader.cpp: they return torch's current stream,
// and torch's generator of a device.

#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <mutex>

#include "torchkiln/torch/torch_cuda.h"

namespace torchkiln {
namespace {

void on_stream(c10::Device device, c10::function_ref<void(CUstream_st*)> body) {
  const c10::cuda::CUDAGuard guard(device);
  body(c10::cuda::getCurrentCUDAStream(device.index()).stream());
}

RandomState next_random(c10::Device device) {
  auto* generator = at::get_generator_or_default<at::CUDAGeneratorImpl>(
      std::nullopt, at::cuda::detail::getDefaultCUDAGenerator(device.index()));
  const std::lock_guard<std::mutex> lock(generator->mutex_);
  const at::PhiloxCudaState philox = generator->philox_cuda_state(4);
  RandomState state;
  if (philox.captured_) {
    state.seed_from = philox.seed_.ptr;
    state.offset_from = philox.offset_.ptr;
    state.offset = philox.offset_intragraph_;
  } else {
    state.seed = philox.seed_.val;
    state.offset = philox.offset_.val;
  }
  return state;
}

constexpr TorchCuda kFunctions{&on_stream, &next_random};
const bool told = (set_torch_cuda(&kFunctions), true);

}  // namespace
}  // namespace torchkiln
