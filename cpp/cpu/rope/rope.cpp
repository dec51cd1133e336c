#include "torchkiln/kernels/rope.h"

#include <algorithm>

#include "rope/angles.h"
#include "torchkiln/cpu/half.h"
#include "torchkiln/cpu/isa.h"

namespace torchkiln::cpu {
namespace TORCHKILN_ISA {
namespace {

template <class Body>
void for_each_head(const Rope& p, int64_t batch, int64_t token, const Body& body) {
  for (const RopeHeads& heads : p.tensors) {
    for (int64_t h = 0; h < heads.heads; ++h) {
      body(heads, batch * heads.x_stride[0] + token * heads.x_stride[1] + h * heads.x_stride[2],
           batch * heads.y_stride[0] + token * heads.y_stride[1] + h * heads.y_stride[2]);
    }
  }
}

template <class T>
void rotate_token(const Rope& p, int64_t batch, int64_t token) {
  using C = Compute<T>;
  const int64_t row = row_of(p.angles.rows, batch, token);
  C cos[kPairs], sin[kPairs];
  for (int64_t pair = 0; pair < p.angles.rotary / 2; pair += kPairs) {
    const int64_t count = std::min(kPairs, p.angles.rotary / 2 - pair);
    read_factors(p.angles, p.angles.cos, batch, row, pair, count, C(1), cos);
    read_factors(p.angles, p.angles.sin, batch, row, pair, count, p.angles.inverse ? C(-1) : C(1),
                 sin);
    for_each_head(p, batch, token, [&](const RopeHeads& heads, int64_t from, int64_t to) {
      rotate(p.angles, static_cast<const T*>(heads.x) + from, static_cast<T*>(heads.y) + to, pair,
             count, cos, sin);
    });
  }
  if (p.angles.rotary == p.head_dim) return;
  for_each_head(p, batch, token, [&](const RopeHeads& heads, int64_t from, int64_t to) {
    std::copy_n(static_cast<const T*>(heads.x) + from + p.angles.rotary,
                p.head_dim - p.angles.rotary, static_cast<T*>(heads.y) + to + p.angles.rotary);
  });
}

}  // namespace

Status rope(const Rope& arguments, int64_t begin, int64_t end) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for (int64_t i = begin; i < end; ++i)
      rotate_token<T>(arguments, i / arguments.tokens, i % arguments.tokens);
    return Status{};
  });
}

}  // namespace TORCHKILN_ISA

TORCHKILN_CPU_ENTRY(rope, (const Rope& arguments, int64_t begin, int64_t end),
                    (arguments, begin, end))

}  // namespace torchkiln::cpu
