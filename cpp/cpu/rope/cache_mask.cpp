#include <algorithm>
#include <limits>

#include "rope/angles.h"
#include "torchkiln/cpu/isa.h"

namespace torchkiln::cpu {
namespace TORCHKILN_ISA {

Status cache_mask(const CacheMask& p, int64_t begin, int64_t end) {
  return dispatch_floating(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Compute<T> infinity = std::numeric_limits<Compute<T>>::infinity();
    const Compute<T> numbers[] = {0, -infinity};
    T rounded[2];
    narrow_run(rounded, numbers, 2);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t last = row_of(p.places, i / p.tokens, i % p.tokens);
      const int64_t seen = std::min(last, p.length - 1) + 1;
      T* const row = static_cast<T*>(p.out) + i * p.length;
      std::fill_n(row, seen, rounded[0]);
      std::fill_n(row + seen, p.length - seen, rounded[1]);
    }
    return Status{};
  });
}

}  // namespace TORCHKILN_ISA

TORCHKILN_CPU_ENTRY(cache_mask, (const CacheMask& arguments, int64_t begin, int64_t end),
                    (arguments, begin, end))

}  // namespace torchkiln::cpu
