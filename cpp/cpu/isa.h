#pragma once

// CPU kernels are compiled once per instruction set, as TORCHKILN_ISA = baseline, avx2 or avx512,
// into a namespace of that name: every file of cpp/cpu but isa.cpp, and the CPU_KERNELS of another
// package. The baseline instance also defines the public function, which picks the widest variant
// that this machine runs. What they call lies in that namespace, too, or is inlined by the
// optimiser (std::min, std::fill_n): an out-of-line copy of a function outside of it would be
// merged by the linker across instruction sets.

#include "torchkiln/status.h"

namespace torchkiln::cpu {

enum class Isa { baseline, avx2, avx512 };

/// The widest instruction set of this machine; TORCHKILN_CPU_ISA=baseline|avx2 in the environment
/// narrows it.
TORCHKILN_EXPORT Isa isa();

/// The same, on behalf of a kernel that is about to run: torchkiln.explain() hears of it.
TORCHKILN_EXPORT Isa isa_for(const char* kernel);

#ifdef TORCHKILN_HAS_X86_ISAS

#define TORCHKILN_DECLARE_VARIANTS(function) \
  namespace avx2 {                           \
  decltype(baseline::function) function;     \
  }                                          \
  namespace avx512 {                         \
  decltype(baseline::function) function;     \
  }

template <class Function>
Function* best_variant(const char* kernel, Function* baseline, Function* avx2, Function* avx512) {
  const Isa widest = isa_for(kernel);
  return widest == Isa::avx512 ? avx512 : widest == Isa::avx2 ? avx2 : baseline;
}

#define TORCHKILN_BEST_VARIANT(function) \
  torchkiln::cpu::best_variant(#function, &baseline::function, &avx2::function, &avx512::function)

#else

#define TORCHKILN_DECLARE_VARIANTS(function)
#define TORCHKILN_BEST_VARIANT(function) (torchkiln::cpu::isa_for(#function), &baseline::function)

#endif

}  // namespace torchkiln::cpu
