#include "torchkiln/cpu/isa.h"

#include <cstdlib>
#include <cstring>

#include "torchkiln/core/trace.h"

#ifdef TORCHKILN_HAS_X86_ISAS
#include <cpuid.h>
#endif

namespace torchkiln::cpu {
namespace {

#ifdef TORCHKILN_HAS_X86_ISAS
/// Whether the CPU converts half precision. __builtin_cpu_supports() of clang 16 has no name for
/// it.
bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#endif

Isa detect() {
#ifdef TORCHKILN_HAS_X86_ISAS
  const char* limit = std::getenv("TORCHKILN_CPU_ISA");
  const bool at_most_baseline = limit != nullptr && std::strcmp(limit, "baseline") == 0;
  const bool at_most_avx2 = limit != nullptr && std::strcmp(limit, "avx2") == 0;
  if (at_most_baseline) return Isa::baseline;
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c() &&
                    __builtin_cpu_supports("bmi2");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq");
  if (avx512 && !at_most_avx2) return Isa::avx512;
  if (avx2) return Isa::avx2;
#endif
  return Isa::baseline;
}

}  // namespace

Isa isa() {
  static const Isa found = detect();
  return found;
}

Isa isa_for(const char* kernel) {
  const Isa found = isa();
  if (trace::Listener* listener = trace::listening()) {
    listener->ran(kernel, found == Isa::avx512 ? "AVX-512"
                          : found == Isa::avx2 ? "AVX2"
                                               : "baseline");
  }
  return found;
}

}  // namespace torchkiln::cpu
