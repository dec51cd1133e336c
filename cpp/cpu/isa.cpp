#include "torchkiln/cpu/isa.h"

#include <cstdlib>
#include <cstring>

#include "torchkiln/core/trace.h"

namespace torchkiln::cpu {
namespace {

Isa detect() {
#ifdef TORCHKILN_HAS_X86_ISAS
  const char* limit = std::getenv("TORCHKILN_CPU_ISA");
  const bool at_most_baseline = limit != nullptr && std::strcmp(limit, "baseline") == 0;
  const bool at_most_avx2 = limit != nullptr && std::strcmp(limit, "avx2") == 0;
  if (at_most_baseline) return Isa::baseline;
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
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
