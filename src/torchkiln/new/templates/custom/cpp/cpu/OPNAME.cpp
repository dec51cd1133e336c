#include "PACKAGE/kernels/OPNAME.h"

#include <algorithm>

#include "torchkiln/cpu/half.h"
#include "torchkiln/cpu/isa.h"

namespace PACKAGE::cpu {

using namespace torchkiln;
using OPNAME_parts::Windows;

// This file is compiled once per instruction set (baseline, AVX2, AVX-512), into a namespace of
// that name. TORCHKILN_CPU_ENTRY defines the function that calls the one for this machine.
namespace TORCHKILN_ISA {

using namespace torchkiln::cpu::TORCHKILN_ISA;

Status OPNAME(const Windows& arguments, int64_t begin, int64_t end) {
  return dispatch_floating(arguments.dtype, [&](auto tag) -> Status {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    const int64_t columns = arguments.columns;
    constexpr int64_t kPiece = 512;  // sums that stay in the L1 cache
    C buffer[kPiece], sums[kPiece];
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t at = 0; at < columns; at += kPiece) {
        const int64_t count = std::min(kPiece, columns - at);
        std::fill_n(sums, count, C(0));
        for (int64_t k = 0; k < arguments.window; ++k) {
          // Adds the element `shift` places further on, where it lies inside the row.
          const int64_t shift = k - arguments.before;
          const int64_t from = std::max<int64_t>(0, -shift - at);
          const int64_t to = std::min(count, columns - shift - at);
          if (from >= to) continue;
          const C* x = read_run(buffer, arguments.x, row * columns + at + from + shift, 1,
                                to - from, arguments.dtype);
          for (int64_t i = from; i < to; ++i) sums[i] += x[i - from];
        }
        narrow_run(static_cast<T*>(arguments.out) + row * columns + at, sums, count);
      }
    }
    return {};
  });
}

}  // namespace TORCHKILN_ISA

TORCHKILN_CPU_ENTRY(OPNAME, (const Windows& arguments, int64_t begin, int64_t end),
                    (arguments, begin, end))

}  // namespace PACKAGE::cpu
