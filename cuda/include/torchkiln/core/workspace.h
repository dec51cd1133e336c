#pragma once

#include <cstddef>
#include <cstdint>

namespace torchkiln {

/// Allocates temporary device memory for a launcher. It refers to a callable void*(size_t bytes),
/// which must outlive the call. The memory is aligned to 16 bytes and remains valid for all kernels
/// that the launcher queues.
class Allocate {
 public:
  template <class Callable>
  Allocate(const Callable& callable)
      : callable_(&callable), call_([](const void* callable, size_t bytes) -> void* {
          return (*static_cast<const Callable*>(callable))(bytes);
        }) {}

  /// Returns null for 0 bytes.
  void* operator()(size_t bytes) const { return bytes == 0 ? nullptr : call_(callable_, bytes); }

 private:
  const void* callable_;
  void* (*call_)(const void* callable, size_t bytes);
};

namespace cpu {

/// The split of a kernel that sums over rows into tasks. Depends on the shape alone, so that
/// results do not depend on the number of threads.
struct Split {
  int64_t tasks;           // number of tasks
  size_t workspace_bytes;  // for partial sums, aligned to 16 bytes
  int64_t results;         // outputs of *_finish(), which adds partial sums; 0: no such step
};

}  // namespace cpu
}  // namespace torchkiln
