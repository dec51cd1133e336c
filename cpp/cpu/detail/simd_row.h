#pragma once

// Access to rows in steps of one register, with conversions at loads and stores. For kernels that
// pass over a row several times, where a converted copy would take longer.

#include <algorithm>

#include "detail/simd.h"

namespace torchkiln::cpu::TORCHKILN_ISA {

/// A register of type C.
template <class C>
using Lanes = Wide<C>;
template <class C>
inline constexpr int64_t kLanes = kWide<C>;

/// FullStep: a step over all lanes of a register. PartialStep: a step over the first few lanes, at
/// the end of a row.
struct FullStep {};
struct PartialStep {
  int64_t count;
};

/// A mask with all bits set in the lanes of the step, as integers of C's size.
template <class C>
auto mask(PartialStep part) {
  decltype(Lanes<C>{} < Lanes<C>{}) lane{};
  for (int k = 0; k < kLanes<C>; ++k) lane[k] = k;
  return lane < static_cast<std::decay_t<decltype(lane[0])>>(part.count);
}

inline Lanes<float> load_lanes(const float* from, FullStep) {
  return load_wide<Lanes<float>>(from);
}
inline Lanes<double> load_lanes(const double* from, FullStep) {
  return load_wide<Lanes<double>>(from);
}

// Conversions of 16-bit types use intrinsics if g++ would otherwise split the registers.

inline Lanes<float> load_lanes(const BFloat16* from, FullStep) {
#ifdef __AVX2__
  const auto words = (Lanes<uint32_t>)_mm256_cvtepu16_epi32(load_wide<__m128i>(from));
#else
  const auto halves = load_wide<Wide<uint16_t, kRegister / 2>>(from);
  const auto words = __builtin_convertvector(halves, Lanes<uint32_t>);
#endif
  return (Lanes<float>)(words << 16);
}

inline Lanes<float> load_lanes(const Half* from, FullStep) {
#ifdef __F16C__
  return (Lanes<float>)_mm256_cvtph_ps(load_wide<__m128i>(from));
#else
  float buffer[kLanes<float>];
  widen_run(buffer, from, /*stride=*/1, kLanes<float>);
  return load_wide<Lanes<float>>(buffer);
#endif
}

/// Copies 4, 2 and 1 elements, each if the count has that bit. g++ would turn a loop into a call of
/// memcpy, which takes as long as a short row.
template <int64_t lanes, class T>
void copy_partial(T* to, const T* from, PartialStep part) {
  if constexpr (lanes > 1) {
    constexpr int64_t kHalf = lanes / 2;
    const bool has_half = (part.count & kHalf) != 0;
    if (has_half) std::memcpy(to, from, kHalf * sizeof(T));
    copy_partial<kHalf>(has_half ? to + kHalf : to, has_half ? from + kHalf : from, part);
  }
}

/// Loads the elements of the step; lanes beyond the end are zero.
template <class T>
Lanes<Compute<T>> load_lanes(const T* from, PartialStep part) {
  T buffer[kLanes<Compute<T>>] = {};
#ifdef __AVX512BW__
  const __m128i all = _mm_maskz_loadu_epi16(static_cast<__mmask8>((1 << part.count) - 1), from);
  std::memcpy(buffer, &all, sizeof(buffer));
#else
  copy_partial<kLanes<Compute<T>>>(buffer, from, part);
#endif
  return load_lanes(buffer, FullStep{});
}

#ifdef __AVX2__
inline Lanes<float> load_lanes(const float* from, PartialStep part) {
  return (Lanes<float>)_mm256_maskload_ps(from, (__m256i)mask<float>(part));
}
inline Lanes<double> load_lanes(const double* from, PartialStep part) {
  return (Lanes<double>)_mm256_maskload_pd(from, (__m256i)mask<double>(part));
}
#endif

inline void store_lanes(float* to, const Lanes<float>& lanes, FullStep) {
  std::memcpy(to, &lanes, sizeof(lanes));
}
inline void store_lanes(double* to, const Lanes<double>& lanes, FullStep) {
  std::memcpy(to, &lanes, sizeof(lanes));
}

inline void store_lanes(BFloat16* to, const Lanes<float>& lanes, FullStep) {
  // Rounds as narrow_bfloat16() does.
  const auto bits = (Lanes<uint32_t>)lanes;
  const Lanes<uint32_t> rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Lanes<uint32_t> quiet_nan = (bits >> 16) | 0x40u;
  const Lanes<uint32_t> result = lanes != lanes ? quiet_nan : rounded;
#ifdef __AVX2__
  const __m256i packed = _mm256_packus_epi32((__m256i)result, (__m256i)result);
  const __m128i halves = _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
#else
  const auto halves = __builtin_convertvector(result, Wide<uint16_t, kRegister / 2>);
#endif
  std::memcpy(to, &halves, sizeof(halves));
}

inline void store_lanes(Half* to, const Lanes<float>& lanes, FullStep) {
  float buffer[kLanes<float>];
  std::memcpy(buffer, &lanes, sizeof(lanes));
  narrow_run(to, buffer, kLanes<float>);
}

template <class T>
void store_lanes(T* to, const Lanes<Compute<T>>& lanes, PartialStep part) {
  T buffer[kLanes<Compute<T>>];
  store_lanes(buffer, lanes, FullStep{});
#ifdef __AVX512BW__
  const auto all = load_wide<__m128i>(buffer);
  _mm_mask_storeu_epi16(to, static_cast<__mmask8>((1 << part.count) - 1), all);
#else
  copy_partial<kLanes<Compute<T>>>(to, buffer, part);
#endif
}

#ifdef __AVX2__
inline void store_lanes(float* to, const Lanes<float>& lanes, PartialStep part) {
  _mm256_maskstore_ps(to, (__m256i)mask<float>(part), (__m256)lanes);
}
inline void store_lanes(double* to, const Lanes<double>& lanes, PartialStep part) {
  _mm256_maskstore_pd(to, (__m256i)mask<double>(part), (__m256d)lanes);
}
#endif

/// Rounds the lanes to T, and converts them back.
template <class T>
Lanes<Compute<T>> round_lanes(const Lanes<Compute<T>>& lanes) {
  T rounded[kLanes<Compute<T>>];
  store_lanes(rounded, lanes, FullStep{});
  return load_lanes(rounded, FullStep{});
}

/// The lanes of the step, with zeros beyond the end.
template <class C>
Lanes<C> within(const Lanes<C>& lanes, FullStep) {
  return lanes;
}
template <class C>
Lanes<C> within(const Lanes<C>& lanes, PartialStep part) {
  return mask<C>(part) ? lanes : Lanes<C>{};
}

/// Calls step(i, FullStep or PartialStep) for i = begin, begin + kLanes<C>, ... below `end`.
template <class C, class Step>
void for_lanes(int64_t begin, int64_t end, const Step& step) {
  int64_t i = begin;
  for (; i + kLanes<C> <= end; i += kLanes<C>) step(i, FullStep{});
  if (i < end) step(i, PartialStep{end - i});
}

/// Calls term(i, FullStep or PartialStep, sums) for all columns i. The term must add to sums[n];
/// totals[n] receives the total. Blocks are summed in four registers with 16 terms per lane, and
/// the sums of blocks are added in double.
template <class C, int count, class Term>
void sum_lanes(double (&totals)[count], int64_t columns, const Term& term) {
  constexpr int64_t kAhead = 4;
  constexpr int64_t kStep = kAhead * kLanes<C>;
  for (double& total : totals) total = 0;
  for (int64_t begin = 0; begin < columns; begin += 16 * kStep) {
    const int64_t end = std::min(begin + 16 * kStep, columns);
    Lanes<C> sums[kAhead][count] = {};
    int64_t i = begin;
    for (; i + kStep <= end; i += kStep) {
#pragma GCC unroll 4
      for (int64_t k = 0; k < kAhead; ++k) term(i + k * kLanes<C>, FullStep{}, sums[k]);
    }
    for_lanes<C>(i, end, [&](int64_t rest, auto part) { term(rest, part, sums[0]); });
    for (int n = 0; n < count; ++n) {
      const Lanes<C> sum = (sums[0][n] + sums[1][n]) + (sums[2][n] + sums[3][n]);
      totals[n] += static_cast<double>(lane_sum<C>(sum));
    }
  }
}

}  // namespace torchkiln::cpu::TORCHKILN_ISA
