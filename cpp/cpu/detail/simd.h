#pragma once

// The CPU counterpart of cuda/detail/reduce/common.cuh: sums of arrays, and rounding of results.

#include <cstring>

#include "torchkiln/cpu/half.h"

namespace torchkiln::cpu::TORCHKILN_ISA {

// Bytes per register. Registers of 64 bytes read memory no faster than those of 32 bytes, and take
// longer to sum at the end.
#ifdef __AVX2__
inline constexpr int64_t kRegister = 32;
#else
inline constexpr int64_t kRegister = 16;
#endif

/// A vector of `bytes` bytes of type C.
template <class C, int64_t bytes>
struct WideOf {
  typedef C type __attribute__((vector_size(bytes)));
};
template <class C, int64_t bytes = kRegister>
using Wide = typename WideOf<C, bytes>::type;
template <class C>
inline constexpr int64_t kWide = kRegister / sizeof(C);

// Elements per block. The sum of a block has the compute type: 16 additions per lane of four
// registers. The sums of blocks are added in double.
template <class C>
inline constexpr int64_t kBlock = 16 * 4 * kWide<C>;

template <class W>
W load_wide(const void* from) {
  W wide;
  std::memcpy(&wide, from, sizeof(wide));
  return wide;
}

/// The sum of the lanes, as a tree.
template <class C, int64_t bytes = kRegister>
C lane_sum(const Wide<C, bytes>& lanes) {
  if constexpr (bytes == sizeof(C)) {
    return lanes[0];
  } else {
    using Half = Wide<C, bytes / 2>;
    const char* from = reinterpret_cast<const char*>(&lanes);
    return lane_sum<C, bytes / 2>(load_wide<Half>(from) + load_wide<Half>(from + bytes / 2));
  }
}

/// The sum of at most kBlock<C> values, in four registers of running sums.
template <class C>
C sum_of(const C* values, int64_t count) {
  constexpr int64_t kStep = kWide<C>;
  Wide<C> a{}, b{}, c{}, d{};
  int64_t i = 0;
  for (; i + 4 * kStep <= count; i += 4 * kStep) {
    a += load_wide<Wide<C>>(values + i);
    b += load_wide<Wide<C>>(values + i + kStep);
    c += load_wide<Wide<C>>(values + i + 2 * kStep);
    d += load_wide<Wide<C>>(values + i + 3 * kStep);
  }
  for (; i + kStep <= count; i += kStep) a += load_wide<Wide<C>>(values + i);
  C rest = 0;
  for (; i < count; ++i) rest += values[i];
  return lane_sum<C>((a + b) + (c + d)) + rest;
}

/// The sum of bfloat16 values, without a converted copy: a shift or a mask makes a float of each
/// half of a 32-bit word.
inline float sum_of(const BFloat16* values, int64_t count) {
  constexpr int64_t kStep = 2 * kWide<uint32_t>;
  Wide<float> a{}, b{}, c{}, d{};
  const auto low = [](Wide<uint32_t> words) { return (Wide<float>)(words << 16); };
  const auto high = [](Wide<uint32_t> words) { return (Wide<float>)(words & 0xffff0000u); };
  int64_t i = 0;
  for (; i + 2 * kStep <= count; i += 2 * kStep) {
    const auto words = load_wide<Wide<uint32_t>>(values + i);
    const auto more = load_wide<Wide<uint32_t>>(values + i + kStep);
    a += low(words);
    b += high(words);
    c += low(more);
    d += high(more);
  }
  for (; i + kStep <= count; i += kStep) {
    const auto words = load_wide<Wide<uint32_t>>(values + i);
    a += low(words);
    b += high(words);
  }
  float rest = 0;
  for (; i < count; ++i) rest += widen(values[i]);
  return lane_sum<float>((a + b) + (c + d)) + rest;
}

/// Converts `count` rows of adjacent elements, and places them one after another.
template <class T>
void widen_rows(Compute<T>* to, const T* from, int64_t row_stride, int64_t columns, int64_t count) {
  if (row_stride == columns) return widen_run(to, from, /*stride=*/1, count * columns);
  for (int64_t row = 0; row < count; ++row)
    widen_run(to + row * columns, from + row * row_stride, /*stride=*/1, columns);
}

/// Adds numbers in groups of 16, then the sums of 16 groups, and so on, so that the rounding error
/// grows with the logarithm of the count.
class Cascade {
 public:
  void add(double number) {
    sums_[0] += number;
    ++count_;
    int64_t left = count_;
    for (int level = 0; level + 1 < kLevels && left % kGroup == 0; ++level, left /= kGroup) {
      sums_[level + 1] += sums_[level];
      sums_[level] = 0;
    }
  }

  double total() const {
    double total = 0;
    for (const double sum : sums_) total += sum;
    return total;
  }

 private:
  static constexpr int kLevels = 8;
  static constexpr int64_t kGroup = 16;
  double sums_[kLevels] = {};
  int64_t count_ = 0;
};

/// Rounds a double to float by rounding to odd: the last bit is set if any digit was cut off. A
/// second rounding, to half precision, is then correct.
inline float sticky_float(double value) {
  const float nearest = static_cast<float>(value);
  const double back = static_cast<double>(nearest);
  const uint32_t bits = bits_of(nearest);
  if (!(back != value) || value != value || (bits & 1u) != 0) return nearest;
  const bool toward_zero = (back < value) == (value > 0);
  return float_of(toward_zero ? bits + 1 : bits - 1);
}

inline void narrow(float* to, double value) { *to = static_cast<float>(value); }
inline void narrow(double* to, double value) { *to = value; }
inline void narrow(Half* to, double value) { *to = narrow_half(sticky_float(value)); }
inline void narrow(BFloat16* to, double value) { *to = narrow_bfloat16(sticky_float(value)); }

/// Sets to[i] = from[i], rounded. float16 is rounded in runs, because g++ does not vectorise its
/// conversion.
template <class T>
void narrow_sums(T* to, const double* from, int64_t count) {
  if constexpr (std::is_same_v<T, Half>) {
    constexpr int64_t kPart = 64;
    float rounded[kPart];
    for (int64_t done = 0; done < count; done += kPart) {
      const int64_t part = std::min(kPart, count - done);
      for (int64_t i = 0; i < part; ++i) rounded[i] = sticky_float(from[done + i]);
      narrow_run(to + done, rounded, part);
    }
  } else {
    for (int64_t i = 0; i < count; ++i) narrow(to + i, from[i]);
  }
}

}  // namespace torchkiln::cpu::TORCHKILN_ISA
