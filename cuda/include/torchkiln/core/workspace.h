#pragma once

#include <cstddef>
#include <cstdint>

namespace torchkiln {

/// Where a launcher takes temporary device memory from: a reference to a callable
/// `void* (size_t bytes)`, which must outlive the call. The memory is aligned to 16 bytes, and
/// stays valid for all that the launcher queues.
class Allocate {
 public:
  template <class Callable>
  Allocate(const Callable& callable)
      : callable_(&callable), call_([](const void* callable, size_t bytes) -> void* {
          return (*static_cast<const Callable*>(callable))(bytes);
        }) {}

  /// Null for 0 bytes.
  void* operator()(size_t bytes) const { return bytes == 0 ? nullptr : call_(callable_, bytes); }

 private:
  const void* callable_;
  void* (*call_)(const void* callable, size_t bytes);
};

namespace cpu {

/// How a kernel that sums over rows is cut: by the shape alone, so that results do not depend on
/// the number of threads.
struct Split {
  int64_t tasks;           // for the kernel
  size_t workspace_bytes;  // of partial sums, aligned to 16 bytes
  int64_t results;         // for its _finish function, which adds the partial sums; 0: none to add
};

}  // namespace cpu
}  // namespace torchkiln
