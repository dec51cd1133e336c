#include "torchkiln/cpu/isa.h"

#include <cstdlib>
#include <cstring>

#include "torchkiln/core/trace.h"

#ifdef __x86_64__
#include <cpuid.h>
#endif

namespace torchkiln::cpu {
namespace {

#ifdef __x86_64__
/// Whether the CPU converts half precision (F16C). Reads CPUID, because __builtin_cpu_supports() of
/// clang 16 does not support F16C.
bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#endif

Isa detect() {
#ifdef __x86_64__
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

/// Reports the instruction set of a kernel to torchkiln.explain().
void report(const char* kernel, Isa isa) {
  if (trace::Listener* listener = trace::listening()) {
    listener->ran(kernel, isa == Isa::avx512 ? "AVX-512" : isa == Isa::avx2 ? "AVX2" : "baseline");
  }
}

#define TORCHKILN_REFUSAL(name)                                                                   \
  "the CPU kernels of this build are for " name                                                   \
  " only, and this processor has less, or TORCHKILN_CPU_ISA allows less. In the folder with the " \
  "sources, type: python -m pip install --no-build-isolation -Ctorchkiln.cpu-instructions=all ."

}  // namespace

Isa isa() {
  static const Isa found = detect();
  return found;
}

Isa isa_for(const char* kernel) {
  const Isa found = isa();
  report(kernel, found);
  return found;
}

Status single_variant(const char* kernel, Isa variant) {
  if (isa() < variant) {
    return {variant == Isa::avx512 ? TORCHKILN_REFUSAL("AVX-512") : TORCHKILN_REFUSAL("AVX2")};
  }
  report(kernel, variant);
  return {};
}

}  // namespace torchkiln::cpu
