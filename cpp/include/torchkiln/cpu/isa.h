#pragma once

// CPU kernels are compiled once per instruction set, with TORCHKILN_ISA = baseline, avx2 or avx512,
// into a namespace of that name: every file of cpp/cpu except isa.cpp, and the CPU_KERNELS of other
// packages. The instance with TORCHKILN_CPU_ENTRIES also defines the public function, which calls
// the widest variant that the machine supports. A build for one machine has a single variant,
// whose public function returns an error on a processor without those instructions. Everything that
// a kernel calls must be in that namespace, too, or be inlined (std::min, std::fill_n): the linker
// would merge out-of-line copies from different instruction sets.

#include "torchkiln/core/status.h"

namespace torchkiln::cpu {

enum class Isa { baseline, avx2, avx512 };

/// The widest instruction set of this machine. The environment variable
/// TORCHKILN_CPU_ISA=baseline|avx2 limits it.
TORCHKILN_EXPORT Isa isa();

/// isa() for a kernel that is about to run. Also reports it to torchkiln.explain().
TORCHKILN_EXPORT Isa isa_for(const char* kernel);

/// For a kernel with a single variant: returns an error if isa() is below that variant, else
/// reports the variant to torchkiln.explain().
TORCHKILN_EXPORT Status single_variant(const char* kernel, Isa variant);

#ifdef TORCHKILN_ALL_ISAS

template <class Function>
Function* best_variant(const char* kernel, Function* baseline, Function* avx2, Function* avx512) {
  const Isa widest = isa_for(kernel);
  return widest == Isa::avx512 ? avx512 : widest == Isa::avx2 ? avx2 : baseline;
}

#define TORCHKILN_DISPATCH_ENTRY(name, parameters, arguments)                               \
  namespace avx2 {                                                                          \
  torchkiln::Status name parameters;                                                        \
  }                                                                                         \
  namespace avx512 {                                                                        \
  torchkiln::Status name parameters;                                                        \
  }                                                                                         \
  torchkiln::Status name parameters {                                                       \
    return torchkiln::cpu::best_variant(#name, &baseline::name, &avx2::name, &avx512::name) \
        arguments;                                                                          \
  }

#else

#define TORCHKILN_DISPATCH_ENTRY(name, parameters, arguments)                       \
  torchkiln::Status name parameters {                                               \
    constexpr auto variant = torchkiln::cpu::Isa::TORCHKILN_ISA;                    \
    const torchkiln::Status found = torchkiln::cpu::single_variant(#name, variant); \
    return found.ok() ? TORCHKILN_ISA::name arguments : found;                      \
  }

#endif

/// Defines the public function `name`, which calls the variant for the widest instruction set of
/// the machine, or the single variant. Place it after the namespace TORCHKILN_ISA, which has a
/// function of that name:
///
///     TORCHKILN_CPU_ENTRY(add, (const Elementwise<2>& p, int64_t begin, int64_t end),
///                         (p, begin, end))
#ifdef TORCHKILN_CPU_ENTRIES
#define TORCHKILN_CPU_ENTRY(name, parameters, arguments) \
  TORCHKILN_DISPATCH_ENTRY(name, parameters, arguments)
#else
#define TORCHKILN_CPU_ENTRY(name, parameters, arguments)
#endif

}  // namespace torchkiln::cpu
