#include "PACKAGE/kernels/OPNAME.h"

#include <algorithm>

#include "torchkiln/cpu/elementwise.h"
#include "torchkiln/cpu/isa.h"

namespace PACKAGE::cpu {

using namespace torchkiln;
using OPNAME_parts::Gradient;
using OPNAME_parts::Rows;
using OPNAME_parts::Term;

// This file is compiled once per instruction set (baseline, AVX2, AVX-512), into a namespace of
// that name. TORCHKILN_CPU_ENTRY defines the function that calls the one for this machine.
namespace TORCHKILN_ISA {

using namespace torchkiln::cpu::TORCHKILN_ISA;

namespace {

/// Eight independent sums, which the compiler keeps in vector registers; in double, because a long
/// sum in float loses digits.
template <class C>
double total_of(const C* values, int64_t count) {
  constexpr int64_t kSums = 8;
  double sums[kSums] = {};
  int64_t at = 0;
  for (; at + kSums <= count; at += kSums) {
    for (int64_t i = 0; i < kSums; ++i) sums[i] += Term{}(static_cast<double>(values[at + i]));
  }
  for (; at < count; ++at) sums[0] += Term{}(static_cast<double>(values[at]));
  double total = 0;
  for (const double sum : sums) total += sum;
  return total;
}

}  // namespace

Status OPNAME(const Rows& arguments, int64_t begin, int64_t end) {
  return dispatch_floating(arguments.dtype, [&](auto tag) -> Status {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    C buffer[kRun];
    for (int64_t row = begin; row < end; ++row) {
      double total = 0;
      for (int64_t at = 0; at < arguments.columns; at += kRun) {
        const int64_t count = std::min(kRun, arguments.columns - at);
        total += total_of(
            read_run(buffer, arguments.x, row * arguments.columns + at, 1, count, arguments.dtype),
            count);
      }
      const C result = static_cast<C>(total);
      narrow_run(static_cast<T*>(arguments.out) + row, &result, 1);
    }
    return {};
  });
}

Status OPNAME_backward(const Elementwise<2>& arguments, int64_t begin, int64_t end) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return elementwise<T>(Gradient{}, arguments, begin, end);
  });
}

}  // namespace TORCHKILN_ISA

TORCHKILN_CPU_ENTRY(OPNAME, (const Rows& arguments, int64_t begin, int64_t end),
                    (arguments, begin, end))
TORCHKILN_CPU_ENTRY(OPNAME_backward, (const Elementwise<2>& arguments, int64_t begin, int64_t end),
                    (arguments, begin, end))

}  // namespace PACKAGE::cpu
