#pragma once

// Memory for the time of one call, from the allocator that torch has for the device.

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>

namespace torchkiln {

/// `bytes` on `device`, which is current while they are taken. On a GPU they are of torch's caching
/// allocator and the current stream: what was queued on that stream before they are given back may
/// go on using them, and torch.cuda.memory_allocated() counts them.
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
  }

  /// Aligned to 16 bytes at least (to 512 on a GPU); null where there are none.
  void* data() const { return memory_.get(); }
  size_t bytes() const { return bytes_; }

 private:
  c10::DataPtr memory_;
  size_t bytes_ = 0;
};

}  // namespace torchkiln
