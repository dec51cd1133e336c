#pragma once

// Blocks of 128 adjacent elements of a row, held by adjacent lanes of a warp. The scale of a block
// takes one reduction over these lanes, without shared memory.

#include "detail/fp8/cast.cuh"
#include "torchkiln/kernels/quantize.h"

namespace torchkiln::fp8 {

inline constexpr unsigned kAllLanes = 0xffffffff;

/// Replaces each value by the largest one among kLanes adjacent lanes.
template <int kLanes, int kCount>
__device__ __forceinline__ void largest_of_lanes(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2)
      values[i] = fmaxf(values[i], __shfl_xor_sync(kAllLanes, values[i], step));
  }
}

/// Vectors of a row that the lanes of a warp round to E4M3: vector k of kLanes adjacent lanes is a
/// block. All lanes of a warp must call the functions.
///
/// The blocks are reduced together. A step exchanges words, each the largest magnitude of a block
/// or, in half precision, of two. A lane sends half of its words, and has half of the blocks
/// afterwards, from twice as many lanes:
///
///   lanes           0 to 3   4 to 7   8 to 11  12 to 15
///   words at first  0 1 2 3  0 1 2 3  0 1 2 3  0 1 2 3
///   step 1          0 1      0 1      2 3      2 3
///   step 2          0        1        2        3
///
/// Then each word is reduced over its lanes. One lane computes the scale of a block, and the others
/// read it.
template <class T, int kSide, int kItems>
class LaneBlocks {
  static constexpr int kLanes = kScaledElements / kSide;
  static constexpr int kInWord = static_cast<int>(sizeof(uint32_t) / sizeof(T));
  static constexpr int kWords = kItems / kInWord;
  static constexpr int kPerWord = kLanes / kWords;  // lanes that have the same word in the end
  static_assert(kPerWord >= kInWord && kItems % kInWord == 0, "a lane for each block");
  using Word = Vec<T, kInWord>;

 public:
  using Items = Vec<T, kSide>[kItems];

  /// The index of the block whose scale quantize() returns to this lane.
  static __device__ __forceinline__ int own() {
    return lane() / kPerWord * kInWord + lane() % kInWord;
  }
  /// Whether this lane is the first lane of its block.
  static __device__ __forceinline__ bool is_first() { return lane() % kPerWord < kInWord; }

  /// Rounds the vectors with has(k), and calls store(k, bytes) for each of them; the elements of
  /// other vectors count as 0. Returns the scale of block own().
  ///
  /// Infinities are replaced before, in a separate loop that few rows need. Inside the loop of
  /// conversions, the compiler would execute the replacement for every element instead of branching
  /// around it.
  template <class Has, class Store>
  static __device__ __forceinline__ float quantize(Items& items, const Has& has,
                                                   const Store& store) {
    float most = own_magnitude(items, has);
    if (__any_sync(kAllLanes, __float_as_uint(most) == kInfinity)) {
#pragma unroll
      for (int k = 0; k < kItems; ++k) {
#pragma unroll
        for (int i = 0; i < kSide; ++i) {
          T& element = items[k].lane[i];
          element = device::convert<T>(without_infinity(widen(element)));
        }
      }
      most = own_magnitude(items, has);
    }
    const uint32_t exponent = fp8_scale_exponent(__float_as_uint(most));
    const uint32_t reciprocal = fp8_reciprocal_bits(exponent);
    const uint32_t own_factors = kInWord == 1 ? reciprocal : reciprocal | reciprocal >> 16;
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      const int from = k / kInWord * kPerWord + k % kInWord;
      const uint32_t factors = __shfl_sync(kAllLanes, own_factors, from, kLanes);
      const auto bytes = scale_and_pack(items[k], factors);
      if (has(k)) store(k, bytes);
    }
    return scale_of(exponent);
  }

 private:
  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % kLanes; }

  /// The largest magnitude of block own(); NaN does not count.
  template <class Has>
  static __device__ __forceinline__ float own_magnitude(const Items& items, const Has& has) {
    Vec<T, kItems> largest;
#pragma unroll
    for (int k = 0; k < kItems; ++k)
      largest.lane[k] = has(k) ? largest_magnitude(items[k]) : T(0.0f);
    uint32_t most[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) most[i] = reinterpret_cast<const uint32_t*>(&largest)[i];
    int offset = kLanes / 2;
#pragma unroll
    for (int words = kWords / 2; words > 0; words /= 2, offset /= 2) {
      const bool is_upper = (lane() & offset) != 0;
#pragma unroll
      for (int i = 0; i < words; ++i) {
        const uint32_t low = most[i], high = most[words + i];
        const uint32_t sent = is_upper ? low : high;
        most[i] = larger_word(is_upper ? high : low, __shfl_xor_sync(kAllLanes, sent, offset));
      }
    }
#pragma unroll
    for (; offset > 0; offset /= 2)
      most[0] = larger_word(most[0], __shfl_xor_sync(kAllLanes, most[0], offset));
    float each[kInWord];
    device::widen(reinterpret_cast<const Word&>(most[0]), each);
    return lane() % kInWord == 0 ? each[0] : each[kInWord - 1];
  }

  /// Rounds item * factor to E4M3. The factor is a power of two, so that unless the product is too
  /// small for E4M3, it is exact in bfloat16, too. In bfloat16 one instruction computes two
  /// products.
  static __device__ __forceinline__ auto scale_and_pack(Vec<T, kSide> item, uint32_t factors) {
    float factor = __uint_as_float(factors & 0xff800000u), value[kSide];
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      auto* const pairs = reinterpret_cast<__nv_bfloat162*>(&item);
#pragma unroll
      for (int i = 0; i < kSide / 2; ++i)
        pairs[i] = __hmul2(pairs[i], reinterpret_cast<const __nv_bfloat162&>(factors));
      factor = 1;
    }
    device::widen(item, value);
    return pack_all<kSide>(factor, false, [&](int i) { return value[i]; });
  }

  static __device__ __forceinline__ T largest_magnitude(const Vec<T, kSide>& item) {
    constexpr uint32_t kMagnitudes = kInWord == 1 ? kMagnitude : 0x7fff7fffu;
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < kSide / kInWord; ++i)
      most = larger_word(most, reinterpret_cast<const uint32_t*>(&item)[i] & kMagnitudes);
    const Word& each = reinterpret_cast<const Word&>(most);
    const Vec<T, 1> first{each.lane[0]}, last{each.lane[kInWord - 1]};
    return device::elementwise_max(first, last).lane[0];
  }

  /// The elementwise maximum of two words; NaN only if both are NaN.
  static __device__ __forceinline__ uint32_t larger_word(uint32_t a, uint32_t b) {
    const Word most =
        device::elementwise_max(reinterpret_cast<const Word&>(a), reinterpret_cast<const Word&>(b));
    return reinterpret_cast<const uint32_t&>(most);
  }
};

}  // namespace torchkiln::fp8
