#pragma once

// Barriers in shared memory, of compute capability 9.0 and later.

#include <cstdint>
#include <cuda/ptx>

namespace torchkiln {

/// Waits until the phase of this parity is complete. Afterwards the calling thread can read all
/// that the threads of `scope` wrote before they arrived at the barrier.
template <class Scope = ::cuda::ptx::scope_cta_t>
__device__ __forceinline__ void wait_for_phase(uint64_t* barrier, uint32_t parity,
                                               Scope scope = ::cuda::ptx::scope_cta) {
  while (!::cuda::ptx::mbarrier_try_wait_parity(::cuda::ptx::sem_acquire, scope, barrier, parity)) {
  }
}

}  // namespace torchkiln
