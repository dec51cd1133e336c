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

/// The words of the elements 4 * position ... 4 * position + 3.
TORCHKILN_FUNCTION Draw draw(uint64_t seed, uint64_t offset, uint64_t position) {
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  // A generator's offset counts words; four of them come from one counter.
  uint32_t c0 = static_cast<uint32_t>(offset >> 2), c1 = static_cast<uint32_t>(offset >> 34);
  uint32_t c2 = static_cast<uint32_t>(position), c3 = static_cast<uint32_t>(position >> 32);
#ifdef __CUDACC__
#pragma unroll
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

/// What a random word is compared with, to be below with the given probability.
inline uint64_t threshold_of(double probability) {
  return static_cast<uint64_t>(probability * 4294967296.0 + 0.5);
}

}  // namespace torchkiln
