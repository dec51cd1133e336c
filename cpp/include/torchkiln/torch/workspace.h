#pragma once

// Temporary memory for one call, from torch's allocator for the device.

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>

namespace torchkiln {

/// `bytes` bytes of memory on `device`, which is current during the allocation. On a GPU the memory
/// comes from torch's caching allocator for the current stream: kernels queued on that stream
/// before the memory is freed may still use it, and torch.cuda.memory_allocated() counts it.
///
///     const Workspace workspace(x.device(), bytes);
///     status = my_kernel(..., workspace.data(), stream);
class Workspace {
 public:
  Workspace() = default;
  Workspace(c10::Device device, size_t bytes) : bytes_(bytes) {
    if (bytes == 0) return;
    const c10::OptionalDeviceGuard guard(device);
    memory_ = c10::GetAllocator(device.type())->allocate(bytes);
    // Fills the memory with NaN under torch.use_deterministic_algorithms(), as torch fills new
    // tensors, so that tests detect a kernel that reads memory before it is written.
    const at::Context& context = at::globalContext();
    if (context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory()) {
      constexpr int kNan = 0xff;  // in each byte
      at::from_blob(data(), {static_cast<int64_t>(bytes)}, at::device(device).dtype(at::kByte))
          .fill_(kNan);
    }
  }

  /// The address of the memory, aligned to at least 16 bytes (512 on a GPU); null for 0 bytes.
  void* data() const { return memory_.get(); }
  size_t bytes() const { return bytes_; }

 private:
  c10::DataPtr memory_;
  size_t bytes_ = 0;
};

}  // namespace torchkiln
