#include "torchkiln/torch/torch_cuda.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <atomic>

namespace torchkiln {
namespace {

std::atomic<const TorchCuda*> found{nullptr};

/// Loads libtorchkiln_cuda.so from this library's own folder, its run path.
const TorchCuda& load() {
  TORCH_CHECK(dlopen("libtorchkiln_cuda.so", RTLD_NOW | RTLD_LOCAL) != nullptr,
              "torchkiln: the part that works with torch's CUDA cannot be loaded: ", dlerror(),
              "; torchkiln doctor tells what is amiss");
  return *found.load(std::memory_order_acquire);
}

}  // namespace

const TorchCuda& torch_cuda() {
  const TorchCuda* functions = found.load(std::memory_order_acquire);
  return functions != nullptr ? *functions : load();
}

void set_torch_cuda(const TorchCuda* functions) {
  found.store(functions, std::memory_order_release);
}

}  // namespace torchkiln
