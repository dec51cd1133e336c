#include "PACKAGE/kernels/OPNAME.h"

#include "torchkiln/cpu/elementwise.h"
#include "torchkiln/cpu/isa.h"

namespace PACKAGE::cpu {

using namespace torchkiln;

// This file is compiled once per instruction set (baseline, AVX2, AVX-512), into a namespace of
// that name. TORCHKILN_CPU_ENTRY defines the function that calls the widest one of the machine.
namespace TORCHKILN_ISA {

using namespace torchkiln::cpu::TORCHKILN_ISA;

Status OPNAME(const Elementwise<2>& arguments, double scale, int64_t begin, int64_t end) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    const OPNAME_parts::Formula<ExactMath, C> formula{static_cast<C>(scale)};
    return elementwise<T>(formula, arguments, begin, end);
  });
}

Status OPNAME_backward(const Elementwise<3, 2>& arguments, double scale, int64_t begin,
                       int64_t end) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    const OPNAME_parts::Gradients<ExactMath, C> gradients{static_cast<C>(scale)};
    return elementwise<T>(gradients, arguments, begin, end);
  });
}

}  // namespace TORCHKILN_ISA

TORCHKILN_CPU_ENTRY(OPNAME,
                    (const Elementwise<2>& arguments, double scale, int64_t begin, int64_t end),
                    (arguments, scale, begin, end))
TORCHKILN_CPU_ENTRY(OPNAME_backward,
                    (const Elementwise<3, 2>& arguments, double scale, int64_t begin, int64_t end),
                    (arguments, scale, begin, end))

}  // namespace PACKAGE::cpu
