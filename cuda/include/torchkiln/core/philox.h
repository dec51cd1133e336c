#pragma once

// Counter-based random numbers: a word depends only on seed, offset and position, so backward draws
// the same numbers as forward. Philox 4x32-10 (Salmon, Moraes, Dror, Shaw, 2011).

#include <cstdint>

#include "torchkiln/core/scalar_math.h"

namespace torchkiln {

/// The source of a kernel's random numbers: either two values, or device memory that is read when
/// the kernel runs. CUDA graphs need the latter, because each replay advances the generator.
struct RandomState {
  uint64_t seed = 0;
  uint64_t offset = 0;                   // added to *offset_from, if offset_from is set
  const int64_t* seed_from = nullptr;    // read instead of `seed`
  const int64_t* offset_from = nullptr;  // read if seed_from is set
  int64_t* record = nullptr;             // the kernel writes {seed, offset} here for backward

  /// A copy of the state whose seed and offset are values, if necessary read from memory.
  TORCHKILN_FUNCTION RandomState resolved() const {
    RandomState state = *this;
    if (seed_from != nullptr) {
      state.seed = static_cast<uint64_t>(*seed_from);
      state.offset = static_cast<uint64_t>(*offset_from) + offset;
    }
    return state;
  }

  /// Writes the values of a resolved state to `record`.
  TORCHKILN_FUNCTION void write_record() const {
    record[0] = static_cast<int64_t>(seed);
    record[1] = static_cast<int64_t>(offset);
  }
};

/// Four random words.
struct Draw {
  uint32_t word[4];
};

/// The four random words at `position` of the sequence that seed and offset select.
TORCHKILN_FUNCTION Draw draw(uint64_t seed, uint64_t offset, uint64_t position) {
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  // The offset of a generator counts words. One Philox counter yields four words.
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

/// The largest 32-bit word that counts as success. `probability` must be above 0.
inline uint32_t last_word(double probability) {
  const double words = probability * 4294967296.0;
  return words >= 4294967295.5 ? 0xffffffffu : words < 1.5 ? 0 : static_cast<uint32_t>(words - 0.5);
}

/// Draws success or failure for element i of the eight elements at a position. Four words serve
/// eight elements: an even element takes a word as it is, the next odd element the same word with
/// its 16-bit halves swapped. The probability of success is (last + 1) / 2^32. The two draws of a
/// word depend on each other only if its upper half, before or after the swap, equals the upper
/// half of `last`: one case in 2^16.
TORCHKILN_FUNCTION bool bernoulli(const Draw& drawn, int i, uint32_t last) {
  const uint32_t word = drawn.word[i / 2];
  return (i % 2 == 0 ? word : word << 16 | word >> 16) <= last;
}

}  // namespace torchkiln
