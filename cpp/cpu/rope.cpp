#include "torchkiln/kernels/rope.h"

#include <algorithm>
#include <limits>

#include "torchkiln/cpu/half.h"
#include "torchkiln/cpu/isa.h"

namespace torchkiln::cpu {
namespace TORCHKILN_ISA {
namespace {

constexpr int64_t kPairs = 64;  // that are computed together

/// The row of the factors of a token; -1 for a position outside of the table.
int64_t row_of(const Rope& p, int64_t batch, int64_t token) {
  if (p.positions == nullptr) return token;
  const int64_t at = batch * p.position_stride[0] + token * p.position_stride[1];
  const int64_t row = p.are_64_bit ? static_cast<const int64_t*>(p.positions)[at]
                                   : static_cast<const int32_t*>(p.positions)[at];
  return 0 <= row && row < p.table_rows ? row : -1;
}

/// Sets to[i] to the factors of `count` pairs, times `sign`.
template <class C>
void read_factors(const Rope& p, const RopeFactors& factors, int64_t batch, int64_t row,
                  int64_t pair, int64_t count, C sign, C* to) {
  if (row < 0) {
    std::fill_n(to, count, std::numeric_limits<C>::quiet_NaN());
    return;
  }
  const int64_t at = batch * factors.batch_stride + row * factors.row_stride + pair * p.factor_step;
  C buffer[kPairs];
  const C* run = read_run(buffer, factors.data, at, p.factor_step, count, p.factor_dtype);
  for (int64_t i = 0; i < count; ++i) to[i] = sign * run[i];
}

template <class T, class C>
void write_run(T* to, int64_t stride, const C* from, int64_t count) {
  if (stride == 1) {
    narrow_run(to, from, count);
  } else {
    scatter_run(to, stride, from, count);
  }
}

/// Rotates `count` pairs of one head, from pair `pair` on.
template <class T, class C>
void rotate(const Rope& p, const T* x, T* y, int64_t pair, int64_t count, const C* cos,
            const C* sin) {
  const int64_t step = p.interleaved ? 2 : 1;
  const int64_t first = pair * step;
  const int64_t second = p.interleaved ? first + 1 : first + p.rotary / 2;
  C a[kPairs], b[kPairs], rotated_a[kPairs], rotated_b[kPairs];
  widen_run(a, x + first, step, count);
  widen_run(b, x + second, step, count);
  for (int64_t i = 0; i < count; ++i) rotated_a[i] = a[i] * cos[i] - b[i] * sin[i];
  for (int64_t i = 0; i < count; ++i) rotated_b[i] = b[i] * cos[i] + a[i] * sin[i];
  write_run(y + first, step, rotated_a, count);
  write_run(y + second, step, rotated_b, count);
}

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
  const int64_t row = row_of(p, batch, token);
  C cos[kPairs], sin[kPairs];
  for (int64_t pair = 0; pair < p.rotary / 2; pair += kPairs) {
    const int64_t count = std::min(kPairs, p.rotary / 2 - pair);
    read_factors(p, p.cos, batch, row, pair, count, C(1), cos);
    read_factors(p, p.sin, batch, row, pair, count, p.inverse ? C(-1) : C(1), sin);
    for_each_head(p, batch, token, [&](const RopeHeads& heads, int64_t from, int64_t to) {
      rotate(p, static_cast<const T*>(heads.x) + from, static_cast<T*>(heads.y) + to, pair, count,
             cos, sin);
    });
  }
  if (p.rotary == p.head_dim) return;
  for_each_head(p, batch, token, [&](const RopeHeads& heads, int64_t from, int64_t to) {
    std::copy_n(static_cast<const T*>(heads.x) + from + p.rotary, p.head_dim - p.rotary,
                static_cast<T*>(heads.y) + to + p.rotary);
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
