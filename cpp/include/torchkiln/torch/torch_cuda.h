#pragma once

// What has to ask torch's CUDA half. It lies in a library of its own, libtorchkiln_cuda, which is
// loaded with the first tensor on a GPU; all else runs beside a torch without CUDA, too.

#include <c10/core/Device.h>
#include <c10/util/FunctionRef.h>

#include "torchkiln/core/philox.h"
#include "torchkiln/core/status.h"

struct CUstream_st;

namespace torchkiln {

/// The functions of that library.
struct TorchCuda {
  /// Makes the device current while body(its current stream) runs.
  void (*on_stream)(c10::Device device, c10::function_ref<void(CUstream_st*)> body);

  /// Takes the next random numbers from torch's generator of the device, and moves it on by one
  /// draw of four words.
  RandomState (*next_random)(c10::Device device);
};

/// Loads the library at the first call; torch's CUDA half has to be there.
TORCHKILN_EXPORT const TorchCuda& torch_cuda();

/// For the library itself, which tells its functions when it is loaded.
TORCHKILN_EXPORT void set_torch_cuda(const TorchCuda* functions);

}  // namespace torchkiln
