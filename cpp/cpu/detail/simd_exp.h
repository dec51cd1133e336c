#pragma once

// The maximum of a row and the sum of the exponentials relative to it, in one pass, for softmax and
// cross-entropy.

#include <algorithm>
#include <limits>

#include "detail/simd.h"
#include "torchkiln/core/scalar_math.h"

namespace torchkiln::cpu::TORCHKILN_ISA {

/// Elements per piece of a row. They are converted and computed together; their buffers stay in the
/// L1 cache.
inline constexpr int64_t kPiece = 1024;

template <class C>
inline constexpr C kInfinity = std::numeric_limits<C>::infinity();

/// The maximum; -infinity for a range that is empty or all NaN. NaN is skipped, because the sum of
/// exponentials will be NaN.
template <class C>
C largest(const C* values, int64_t count) {
  constexpr int64_t kStep = kWide<C>;
  const auto larger = [](Wide<C> a, Wide<C> b) { return a > b ? a : b; };
  Wide<C> lowest;
  for (int64_t i = 0; i < kStep; ++i) lowest[i] = -kInfinity<C>;
  Wide<C> a = lowest, b = lowest, c = lowest, d = lowest;
  int64_t i = 0;
  for (; i + 4 * kStep <= count; i += 4 * kStep) {
    a = larger(load_wide<Wide<C>>(values + i), a);
    b = larger(load_wide<Wide<C>>(values + i + kStep), b);
    c = larger(load_wide<Wide<C>>(values + i + 2 * kStep), c);
    d = larger(load_wide<Wide<C>>(values + i + 3 * kStep), d);
  }
  for (; i + kStep <= count; i += kStep) a = larger(load_wide<Wide<C>>(values + i), a);
  a = larger(larger(a, b), larger(c, d));
  C result = -kInfinity<C>;
  for (int64_t k = 0; k < kStep; ++k) result = a[k] > result ? a[k] : result;
  for (; i < count; ++i) result = values[i] > result ? values[i] : result;
  return result;
}

/// The maximum of bfloat16 values, which are converted as in sum_of().
inline float largest(const BFloat16* values, int64_t count) {
  constexpr int64_t kStep = 2 * kWide<uint32_t>;
  const auto larger = [](Wide<float> a, Wide<float> b) { return a > b ? a : b; };
  Wide<float> lowest;
  for (int64_t i = 0; i < kWide<float>; ++i) lowest[i] = -kInfinity<float>;
  Wide<float> a = lowest, b = lowest;
  int64_t i = 0;
  for (; i + kStep <= count; i += kStep) {
    const auto words = load_wide<Wide<uint32_t>>(values + i);
    a = larger((Wide<float>)(words << 16), a);
    b = larger((Wide<float>)(words & 0xffff0000u), b);
  }
  a = larger(a, b);
  float result = -kInfinity<float>;
  for (int64_t k = 0; k < kWide<float>; ++k) result = a[k] > result ? a[k] : result;
  for (; i < count; ++i) result = widen(values[i]) > result ? widen(values[i]) : result;
  return result;
}

/// The sum of `count` values: in C within a block, in double over blocks.
template <class C>
double piece_sum(const C* values, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; i += kBlock<C>)
    sum += static_cast<double>(sum_of(values + i, std::min(kBlock<C>, count - i)));
  return sum;
}

/// The logarithm of a normal number, from the series of the inverse hyperbolic tangent; NaN for
/// NaN. The relative error for float is at most 2e-9, one digit better than float. It replaces the
/// C library's log: a loop that calls log is not vectorised, and the symbol version of log needs a
/// newer glibc than wheels may require.
template <class C>
TORCHKILN_FUNCTION double log_of(double number) {
  constexpr int64_t kRootOfHalfBits = 0x3fe6a09e667f3bcd;
  int64_t bits;
  std::memcpy(&bits, &number, sizeof(bits));
  // number = mantissa * 2^exponent, with a mantissa between the square roots of 1/2 and of 2. The
  // exponent is converted to double by adding 1.5 * 2^52, since not every processor converts
  // integers in vectors.
  const int64_t exponent = (bits - kRootOfHalfBits) >> 52;
  const int64_t mantissa_bits = bits - exponent * (int64_t{1} << 52);
  const int64_t shifted_bits = exponent + 0x4338000000000000;
  double mantissa, shifted;
  std::memcpy(&mantissa, &mantissa_bits, sizeof(mantissa));
  std::memcpy(&shifted, &shifted_bits, sizeof(shifted));
  const double power = shifted - 6755399441055744.0;
  const double f = mantissa - 1.0;
  const double s = f / (mantissa + 1.0);
  const double square = s * s;
  double p = 0;
  if constexpr (std::is_same_v<C, double>) {
    p = 1.0 / 21.0;
    p = p * square + 1.0 / 19.0;
    p = p * square + 1.0 / 17.0;
    p = p * square + 1.0 / 15.0;
    p = p * square + 1.0 / 13.0;
    p = p * square + 1.0 / 11.0;
  }
  p = p * square + 1.0 / 9.0;
  p = p * square + 1.0 / 7.0;
  p = p * square + 1.0 / 5.0;
  p = p * square + 1.0 / 3.0;
  const double series = 2.0 * s + 2.0 * s * square * p;
  const double result =
      power * 0.693147180369123816490 + (power * 1.90821492927058770002e-10 + series);
  return number == number ? result : number;
}

/// The maximum of a row and the sum of exp(value - maximum), computed piece by piece. If a piece
/// has a larger maximum, the sum is rescaled. The sum is NaN if the row contains NaN or +infinity,
/// or only -infinity.
template <class C>
class ExponentialSum {
 public:
  /// Adds a piece, and sets powers[i] = exp(values[i] - shift()) with the new shift().
  template <class T>
  void add(const T* values, int64_t count, C* powers) {
    const C maximum = largest(values, count);
    if (maximum > max_) {
      if (max_ > -kInfinity<C>)
        sum_ *= ExactMath::exp(static_cast<double>(max_) - static_cast<double>(maximum));
      max_ = maximum;
    }
    const C by = shift();
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) powers[i] = ExactMath::exp_or_zero(widen(values[i]) - by);
    sum_ += piece_sum(powers, count);
  }

  /// The maximum so far, or 0 if there is nothing above -infinity.
  C shift() const { return max_ == -kInfinity<C> ? C(0) : max_; }
  double sum() const {
    return max_ == -kInfinity<C> ? std::numeric_limits<double>::quiet_NaN() : sum_;
  }
  /// The sum as in sum(), except that it is 0 if all values were -infinity.
  double sum_or_zero() const { return sum_; }

 private:
  C max_ = -kInfinity<C>;
  double sum_ = 0;
};

/// Exponents z below this bound are raised to it in products z * exp(z): these products are then 0,
/// also for -infinity, whose product would be NaN.
template <class C>
constexpr C kLeastExponent = C(-1e4);

template <class C>
C bounded(C exponent) {
  return exponent < kLeastExponent<C> ? kLeastExponent<C> : exponent;
}

}  // namespace torchkiln::cpu::TORCHKILN_ISA
