#include "PACKAGE/kernels/OPNAME.h"

#include "torchkiln/cpu/elementwise.h"
#include "torchkiln/cpu/isa.h"

namespace PACKAGE::cpu {

using torchkiln::Compute;
using torchkiln::Elementwise;
using torchkiln::ExactMath;
using torchkiln::Status;

// Compiled once for each instruction set; the widest that the machine has is taken at run time.
namespace TORCHKILN_ISA {

namespace loops = torchkiln::cpu::TORCHKILN_ISA;

Status OPNAME(const Elementwise<2>& arguments, double scale, int64_t begin, int64_t end) {
  return loops::dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    const OPNAME_parts::Formula<ExactMath, C> formula{static_cast<C>(scale)};
    return loops::elementwise<T>(formula, arguments, begin, end);
  });
}

Status OPNAME_backward(const Elementwise<3, 2>& arguments, double scale, int64_t begin,
                       int64_t end) {
  return loops::dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    const OPNAME_parts::Gradients<ExactMath, C> gradients{static_cast<C>(scale)};
    return loops::elementwise<T>(gradients, arguments, begin, end);
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
