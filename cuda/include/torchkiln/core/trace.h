#pragma once

// What torchkiln.explain() hears of a call. Whoever launches a kernel tells it here, with what was
// just decided; where nobody listens, that is one load and a test.

#include <cstdint>

#include "torchkiln/core/status.h"

namespace torchkiln::trace {

/// A kernel that has been queued on a GPU.
struct GpuLaunch {
  const char* kernel;  // mangled; null where the runtime does not know it
  unsigned blocks[3];
  unsigned threads[3];
  int cluster;                    // blocks of a cluster
  int dynamic_shared_bytes;       // of a block
  int static_shared_bytes;        // of a block
  int registers;                  // of a thread
  int local_bytes;                // of a thread: spilled registers and arrays
  int blocks_per_multiprocessor;  // as many as fit
  int multiprocessors;
  int most_threads;  // that a multiprocessor holds
};

class Listener {
 public:
  virtual void launched(const GpuLaunch& launch) = 0;
  /// A part of a kernel runs on a CPU, in the variant for an instruction set.
  virtual void ran(const char* kernel, const char* instruction_set) = 0;
  /// Something was decided that a user may want to know.
  virtual void noted(const char* words) = 0;

 protected:
  ~Listener() = default;
};

/// The process has one, so that kernels are heard on whichever thread they are launched.
inline TORCHKILN_EXPORT Listener* listener = nullptr;

inline Listener* listening() { return __atomic_load_n(&listener, __ATOMIC_ACQUIRE); }

/// Takes the place of the one before; null ends it.
inline void listen(Listener* next) { __atomic_store_n(&listener, next, __ATOMIC_RELEASE); }

}  // namespace torchkiln::trace
