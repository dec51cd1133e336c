#pragma once

// Random numbers that depend on nothing but a seed, an offset and a position: Philox 4x32-10
// (Salmon, Moraes, Dror, Shaw, 2011). What forward has drawn, backward draws again.

#include <cstdint>

#include "torchkiln/core/scalar_math.h"

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

/// The largest of the 32-bit words that stand for "yes" with the given probability, which is not 0.
inline uint32_t last_word(double probability) {
  const double words = probability * 4294967296.0;
  return words >= 4294967295.5 ? 0xffffffffu : words < 1.5 ? 0 : static_cast<uint32_t>(words - 0.5);
}

/// Whether element i of the eight at a position is a "yes". Eight from four words: one takes a word
/// as it is, its neighbour the word with its halves exchanged. Each has its probability to 32 bits;
/// that one of the two is decided by bits of the other happens once in 2^16.
TORCHKILN_FUNCTION bool says_yes(const Draw& drawn, int i, uint32_t last) {
  const uint32_t word = drawn.word[i / 2];
  return (i % 2 == 0 ? word : word << 16 | word >> 16) <= last;
}

}  // namespace torchkiln
