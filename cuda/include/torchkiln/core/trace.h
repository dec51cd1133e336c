#pragma once

// Events of a call, for torchkiln.explain(). The code that launches a kernel reports the launch
// here. Without a listener this costs one load and one test.

#include <cstdint>

#include "torchkiln/core/status.h"

namespace torchkiln::trace {

/// A kernel that was queued on a GPU.
struct GpuLaunch {
  const char* kernel;  // mangled name; null if the runtime cannot resolve it
  unsigned blocks[3];
  unsigned threads[3];
  int cluster;                    // blocks per cluster
  int dynamic_shared_bytes;       // per block
  int static_shared_bytes;        // per block
  int registers;                  // per thread
  int local_bytes;                // per thread: spilled registers and local arrays
  int blocks_per_multiprocessor;  // occupancy limit
  int multiprocessors;
  int most_threads;  // per multiprocessor
};

class Listener {
 public:
  virtual void launched(const GpuLaunch& launch) = 0;
  /// Called when a part of a kernel runs on the CPU, compiled for this instruction set.
  virtual void ran(const char* kernel, const char* instruction_set) = 0;
  /// Called for a decision that a user may want to see, as a sentence.
  virtual void noted(const char* words) = 0;

 protected:
  ~Listener() = default;
};

/// One listener per process, so that launches on every thread are reported.
inline TORCHKILN_VISIBLE Listener* listener = nullptr;

inline Listener* listening() { return __atomic_load_n(&listener, __ATOMIC_ACQUIRE); }

/// Replaces the listener; null removes it.
inline void listen(Listener* next) { __atomic_store_n(&listener, next, __ATOMIC_RELEASE); }

}  // namespace torchkiln::trace
