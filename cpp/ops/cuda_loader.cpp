// Loads libtorchkiln_cuda (cuda_bridge.cpp) at the first call on a GPU, so that the ops can be
// imported and run on a CPU without torch's CUDA libraries.

#include "torchkiln/torch/torch_cuda.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <atomic>
#include <string>

namespace torchkiln {
namespace {

std::atomic<const TorchCuda*> found{nullptr};

/// The folder that contains this library.
std::string own_folder() {
  Dl_info info{};
  if (dladdr(&found, &info) == 0 || info.dli_fname == nullptr) return "";
  const std::string path = info.dli_fname;
  return path.substr(0, path.rfind('/') + 1);
}

/// Loads libtorchkiln_cuda from this library's folder. It is loaded by its path, because by its
/// name alone a library could be found that is already loaded, and that has called set_torch_cuda()
/// of another copy of torchkiln.
const TorchCuda& load() {
  const std::string path = own_folder() + "libtorchkiln_cuda.so";
  TORCH_CHECK(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL) != nullptr,
              "torchkiln: got no libtorchkiln_cuda, expected one that can be loaded: ", dlerror(),
              "; to find the reason, type torchkiln doctor");
  const TorchCuda* const functions = found.load(std::memory_order_acquire);
  TORCH_CHECK(functions != nullptr, "torchkiln: got ", path,
              " of another copy of torchkiln in one process, expected one copy");
  return *functions;
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
