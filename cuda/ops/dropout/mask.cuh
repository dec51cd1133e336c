#pragma once

// The mask of dropout: which of N adjacent elements are kept. One Philox draw serves eight
// elements.

#include "torchkiln/device/vec.cuh"
#include "torchkiln/kernels/dropout.h"

namespace torchkiln::cuda {

using namespace device;
namespace {

/// Whether each of N adjacent elements is kept. `at`, the index of the first element, is a multiple
/// of N.
template <int N>
struct Mask {
  Draw drawn;
  int first;
  uint32_t last;

  __device__ __forceinline__ Mask(const Dropout& dropout, const RandomState& random, int64_t at)
      : drawn(draw(random.seed, random.offset, static_cast<uint64_t>(at) / 8)),
        first(static_cast<int>(at % 8)),
        last(dropout.last) {
    if constexpr (N < 8) {
      // Moves the words for these elements to the front of the array. A variable index would move
      // the array to local memory.
#pragma unroll
      for (int w = 0; w < (N + 1) / 2; ++w) {
#pragma unroll
        for (int from = w + 1; from < 4; ++from)
          if (from == first / 2 + w) drawn.word[w] = drawn.word[from];
      }
      first %= 2;
    }
  }

  __device__ __forceinline__ bool kept(int i) const {
    return N > 1        ? bernoulli(drawn, i, last)
           : first == 0 ? bernoulli(drawn, 0, last)
                        : bernoulli(drawn, 1, last);
  }
};

}  // namespace
}  // namespace torchkiln::cuda
