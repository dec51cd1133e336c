#pragma once

// Access to torch's CUDA library. The implementation is libtorchkiln_cuda, loaded at the first call
// with a CUDA tensor, so that libtorchkiln itself also runs with a CPU build of torch.

#include <c10/core/Device.h>
#include <c10/util/FunctionRef.h>

#include "torchkiln/core/philox.h"
#include "torchkiln/core/status.h"

struct CUstream_st;

namespace torchkiln {

/// The functions of libtorchkiln_cuda.
struct TorchCuda {
  /// Makes the device current, and calls body() with the current stream of the device.
  void (*on_stream)(c10::Device device, c10::function_ref<void(CUstream_st*)> body);

  /// Returns the state of torch's generator of the device, and advances the generator by 4 words
  /// per thread.
  RandomState (*next_random)(c10::Device device);
};

/// The functions of libtorchkiln_cuda, which is loaded at the first call. Torch's CUDA library must
/// already be loaded.
TORCHKILN_EXPORT const TorchCuda& torch_cuda();

/// Called by libtorchkiln_cuda when it is loaded.
TORCHKILN_EXPORT void set_torch_cuda(const TorchCuda* functions);

}  // namespace torchkiln
