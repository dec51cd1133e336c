#pragma once

// The vectors of a lane, in their dtype: their largest magnitudes, and the products of elements and
// scales. Half precision compares two magnitudes per instruction; bfloat16 also multiplies two
// elements per instruction. The product with a power of two is exact, unless it underflows: E4M3
// rounds such a product to 0 in any case.

#include "detail/fp8/block.cuh"

namespace torchkiln::fp8 {

inline constexpr int kSide = 8;                         // columns per lane
inline constexpr int kLanes = kScaledElements / kSide;  // lanes per row

/// The number of 32-bit words of a vector, and the type of a word.
template <class T, int N>
inline constexpr int kWords = N * static_cast<int>(sizeof(T)) / 4;
template <class T, int N>
__device__ __forceinline__ uint32_t& word(Vec<T, N>& vector, int i) {
  return reinterpret_cast<uint32_t*>(&vector)[i];
}

/// A loaded vector as 32-bit words. As an array of half precision, nvcc would select or carry each
/// element in a register of its own.
template <class T>
struct Words {
  Vec<uint32_t, kWords<T, kSide>> words{};

  __device__ __forceinline__ const Vec<T, kSide>& vector() const {
    return reinterpret_cast<const Vec<T, kSide>&>(words);
  }
};

/// The vector at this address; 0 unless `wanted`.
template <class T>
__device__ __forceinline__ Words<T> load_if(bool wanted, const T* from) {
  Words<T> found;
  if (wanted) found.words = *reinterpret_cast<const decltype(found.words)*>(from);
  return found;
}

/// The largest element of each of two vectors.
template <class T, int N>
__device__ __forceinline__ Vec<T, 2> largest_of_both(const Vec<T, N>& a, const Vec<T, N>& b) {
  if constexpr (N == 2) {
    return device::elementwise_max(Vec<T, 2>{a.lane[0], b.lane[0]},
                                   Vec<T, 2>{a.lane[1], b.lane[1]});
  } else {
    using Half = Vec<T, N / 2>;
    const auto folded = [](const Vec<T, N>& v) {
      return device::elementwise_max(reinterpret_cast<const Half*>(&v)[0],
                                     reinterpret_cast<const Half*>(&v)[1]);
    };
    return largest_of_both(folded(a), folded(b));
  }
}

/// Replaces each element by the largest one of a group of lanes: those whose numbers differ only in
/// the bits from `first` to below `end`, both powers of two.
template <class T, int N>
__device__ __forceinline__ void largest_of_lanes(Vec<T, N>& values, int first, int end) {
#pragma unroll
  for (int step = first; step < end; step *= 2) {
    Vec<T, N> others;
#pragma unroll
    for (int i = 0; i < kWords<T, N>; ++i)
      word(others, i) = __shfl_xor_sync(kAllLanes, word(values, i), step);
    values = device::elementwise_max(values, others);
  }
}

/// The largest magnitude of a row, for N rows. `values` has the magnitudes in this lane's part of
/// each row. Of 2 * kStep adjacent lanes, lane l gets the result of row l * N / (2 * kStep): in
/// each step a lane passes half of its rows to another lane.
template <int kStep, class T, int N>
__device__ __forceinline__ float largest_of_row(Vec<T, N> values) {
  const bool is_second = (threadIdx.x & kStep) != 0;
  if constexpr (kWords<T, N> == 1) {
    largest_of_lanes(values, 1, 2 * kStep);
    const float first = widen(values.lane[0]), last = widen(values.lane[N - 1]);
    return is_second ? last : first;
  } else {
    Vec<T, N / 2> kept, given;
#pragma unroll
    for (int i = 0; i < kWords<T, N / 2>; ++i) {
      const uint32_t low = word(values, i), high = word(values, i + kWords<T, N / 2>);
      word(kept, i) = is_second ? high : low;
      word(given, i) = __shfl_xor_sync(kAllLanes, is_second ? low : high, kStep);
    }
    return largest_of_row<kStep / 2>(device::elementwise_max(kept, given));
  }
}

/// The exponent of the scale for a block with this largest magnitude.
__device__ __forceinline__ uint32_t exponent_for(float magnitude) {
  return fp8_scale_exponent(__float_as_uint(magnitude));
}

/// A power of two that scales elements of type T: bfloat16 for bfloat16, otherwise float32.
template <class T>
using Factor = std::conditional_t<std::is_same_v<T, __nv_bfloat16>, T, float>;

/// The factor for a scale with this exponent. A bfloat16 factor fills the word twice.
template <class T>
__device__ __forceinline__ uint32_t factor_word(uint32_t exponent) {
  const uint32_t bits = fp8_reciprocal_bits(exponent);
  return sizeof(Factor<T>) == 2 ? __byte_perm(bits, 0, 0x3232) : bits;
}
/// The factor in a word, as a vector of two equal factors.
template <class T>
__device__ __forceinline__ Vec<Factor<T>, 2> twice(uint32_t factor) {
  const uint32_t words[2] = {factor, factor};
  return reinterpret_cast<const Vec<Factor<T>, 2>&>(words);
}

/// Two elements times their factors.
template <class T>
__device__ __forceinline__ float2 scaled(const Vec<T, 2>& two, const Vec<Factor<T>, 2>& by) {
  float value[2];
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    Vec<T, 2> product;
    reinterpret_cast<__nv_bfloat162&>(product) = __hmul2(
        reinterpret_cast<const __nv_bfloat162&>(two), reinterpret_cast<const __nv_bfloat162&>(by));
    device::widen(product, value);
    return {value[0], value[1]};
  } else {
    device::widen(two, value);
    return {value[0] * by.lane[0], value[1] * by.lane[1]};
  }
}

/// Rounds four numbers to E4M3, one per byte.
__device__ __forceinline__ uint32_t pack(float2 low, float2 high) {
  return pack(low.x, low.y) | pack(high.x, high.y) << 16;
}

}  // namespace torchkiln::fp8
