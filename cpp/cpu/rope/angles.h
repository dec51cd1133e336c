#pragma once

// The factors of a rotation, and the rotation of runs of pairs.

#include <algorithm>
#include <limits>

#include "torchkiln/cpu/half.h"
#include "torchkiln/kernels/rope.h"

namespace torchkiln::cpu::TORCHKILN_ISA {

inline constexpr int64_t kPairs = 64;  // most pairs of a run, which are computed together

/// The row of a token in the tables of cos and sin; -1 if its position is outside of them.
inline int64_t row_of(const TokenRows& p, int64_t batch, int64_t token) {
  int64_t row = token;
  if (p.positions != nullptr) {
    const int64_t at = batch * p.stride[0] + token * p.stride[1];
    row = p.are_64_bit ? static_cast<const int64_t*>(p.positions)[at]
                       : static_cast<const int32_t*>(p.positions)[at];
  }
  return 0 <= row && row < p.rows ? row : -1;
}

/// Reads the factors of `count` pairs, times `sign`, into to[i].
template <class C>
void read_factors(const RopeAngles& p, const RopeFactors& factors, int64_t batch, int64_t row,
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
void rotate(const RopeAngles& p, const T* x, T* y, int64_t pair, int64_t count, const C* cos,
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

}  // namespace torchkiln::cpu::TORCHKILN_ISA
