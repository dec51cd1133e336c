#pragma once

// Random numbers that depend on nothing but a seed, an offset and a position: Philox 4x32-10
// (Salmon, Moraes, Dror, Shaw, 2011). What forward has drawn, backward draws again.

#include <cstdint>

#include "torchkiln/math.h"

namespace torchkiln {

/// Where a kernel's random numbers come from: values, or memory that is read when the kernel runs
/// (under a CUDA graph, whose replays move the generator on).
struct RandomState {
  uint64_t seed = 0;
  uint64_t offset = 0;                   // added to *offset_from
  const int64_t* seed_from = nullptr;    // instead of `seed`
  const int64_t* offset_from = nullptr;  // read where seed_from is
  int64_t* record = nullptr;             // where {seed, offset} are left for backward

  /// The values themselves, read from memory where they lie there.
  TORCHKILN_FUNCTION RandomState resolved() const {
    RandomState state = *this;
    if (seed_from != nullptr) {
      state.seed = static_cast<uint64_t>(*seed_from);
      state.offset = static_cast<uint64_t>(*offset_from) + offset;
    }
    return state;
  }
};

/// Four random words.
struct Draw {
  uint32_t word[4];
};

/// The words at a position of the sequence that seed and offset stand for.
TORCHKILN_FUNCTION Draw draw(uint64_t seed, uint64_t offset, uint64_t position) {
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  // A generator's offset counts words; four of them come from one counter.
  uint32_t c0 = static_cast<uint32_t>(offset >> 2), c1 = static_cast<uint32_t>(offset >> 34);
  uint32_t c2 = static_cast<uint32_t>(position), c3 = static_cast<uint32_t>(position >> 32);
#ifdef __CUDA_ARCH__
#pragma unroll
#elif !defined(__CUDACC__)
#pragma GCC unroll 10
#endif
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53u} * c0;
    const uint64_t product1 = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ key0;
    c1 = static_cast<uint32_t>(product1);
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ key1;
    c3 = static_cast<uint32_t>(product0);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

/// What 32 random bits are compared with, to be below with the given probability.
inline uint64_t threshold_of(double probability) {
  return static_cast<uint64_t>(probability * 4294967296.0 + 0.5);
}

/// Which of the elements 8 * position ... 8 * position + 7 have random bits below the threshold, as
/// a mask. Sixteen bits decide, eight elements from one draw; where they equal those of the
/// threshold, a second draw gives the lower sixteen.
TORCHKILN_FUNCTION uint32_t below(uint64_t threshold, uint64_t seed, uint64_t offset,
                                  uint64_t position) {
  const Draw upper = draw(seed, offset, position);
  const uint32_t high = static_cast<uint32_t>(threshold >> 16);
  uint32_t mask = 0, ties = 0;
#ifdef __CUDA_ARCH__
#pragma unroll
#elif !defined(__CUDACC__)
#pragma GCC unroll 8
#endif
  for (int i = 0; i < 8; ++i) {
    const uint32_t bits = upper.word[i / 2] >> (i % 2 * 16) & 0xffffu;
    mask |= static_cast<uint32_t>(bits < high) << i;
    ties |= static_cast<uint32_t>(bits == high) << i;
  }
  if (ties != 0) {
    const uint32_t low = static_cast<uint32_t>(threshold) & 0xffffu;
    // Another sequence: offsets of a generator stay far below 2^63.
    const Draw lower = draw(seed, offset | uint64_t{1} << 63, position);
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int i = 0; i < 8; ++i) {
      const uint32_t bits = lower.word[i / 2] >> (i % 2 * 16) & 0xffffu;
      mask |= (ties >> i & 1u) & static_cast<uint32_t>(bits < low) ? 1u << i : 0u;
    }
  }
  return mask;
}

}  // namespace torchkiln
