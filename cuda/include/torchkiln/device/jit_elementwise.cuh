#pragma once

// Elementwise kernels of formulas that are known at run time only, for torchkiln.jit. A few types
// and one kernel without CUDA's C++ library, so that they compile in 0.1 s.
//
// A thread owns kUnroll vectors of kLanes elements along the innermost dimension, a warp adjacent
// vectors. An operand is contiguous there (Reach::vector), constant (Reach::one), or has any stride
// (Reach::any), in which case kLanes is 1.

#include "torchkiln/core/functors.h"
#include "torchkiln/core/layout.h"
#include "torchkiln/device/fast_divide.cuh"
#include "torchkiln/device/vec.cuh"

namespace torchkiln::device {

// maximum() and minimum() return NaN if either argument is NaN, as in torch.
template <class C>
TORCHKILN_FUNCTION C maximum(C a, C b) {
  return a > b || a != a ? a : b;
}
template <class C>
TORCHKILN_FUNCTION C minimum(C a, C b) {
  return a < b || a != a ? a : b;
}
template <class C>
TORCHKILN_FUNCTION C sign(C a) {
  return a > C(0) ? C(1) : a < C(0) ? C(-1) : a != a ? a : C(0);
}

namespace jit_elementwise {

inline constexpr int kThreads = 256;
inline constexpr int kUnroll = 2;

enum class Reach { vector, one, any };

/// An operand: its element type and how it is read.
template <class Type, Reach kHow>
struct Operand {
  using T = Type;
  static constexpr Reach kReach = kHow;
};

/// The iteration space, in the binary layout that the host packs. Dimension 0 is the innermost one.
/// Its size is in vectors, as is its stride for operands that are read in vectors.
template <int kOperands>
struct Space {
  int64_t count;     // vectors of the whole space
  int64_t elements;  // along the innermost dimension; the last vector may reach beyond them
  int32_t rank;
  int32_t narrow;  // fewer than 2^31 vectors: multiplication and shift instead of division
  uint32_t divisor[kMaxRank];
  uint32_t multiplier[kMaxRank];
  uint32_t shift[kMaxRank];
  int64_t size[kMaxRank];
  int64_t stride[kOperands][kMaxRank];
  void* data[kOperands];

  /// Computes the offset of vector `at` in each operand, and its index along dimension 0.
  __device__ __forceinline__ void locate(int64_t at, int64_t (&offset)[kOperands],
                                         int64_t& innermost) const {
#pragma unroll
    for (int k = 0; k < kOperands; ++k) offset[k] = 0;
#pragma unroll 1
    for (int d = 0; d < rank; ++d) {
      int64_t index = at;
      if (d + 1 < rank) {
        int64_t rest;
        if (narrow) {
          const uint32_t n = static_cast<uint32_t>(at);
          rest = divisor[d] < 2 ? n : __umulhi(n, multiplier[d]) >> shift[d];
        } else {
          rest = static_cast<int64_t>(static_cast<uint64_t>(at) / static_cast<uint64_t>(size[d]));
        }
        index = at - rest * size[d];
        at = rest;
      }
      if (d == 0) innermost = index;
#pragma unroll
      for (int k = 0; k < kOperands; ++k) offset[k] += index * stride[k][d];
    }
  }
};

/// Loads a vector of one input and converts it to the compute type. Lanes from `valid` on do not
/// exist.
template <class In, int kLanes, class C>
__device__ __forceinline__ void fetch(const void* data, int64_t offset, int valid,
                                      C (&to)[kLanes]) {
  using T = typename In::T;
  const T* from = static_cast<const T*>(data) + offset;
  if constexpr (In::kReach != Reach::vector || kLanes == 1) {
    const C value = convert<C>(*from);
#pragma unroll
    for (int i = 0; i < kLanes; ++i) to[i] = value;
  } else {
    if (valid == kLanes) {
      widen(load_vector<kLanes>(from), to);
    } else {
#pragma unroll
      for (int i = 0; i < kLanes; ++i) to[i] = i < valid ? convert<C>(from[i]) : C(0);
    }
  }
}

template <class Out, int kLanes, class C>
__device__ __forceinline__ void leave(void* data, int64_t offset, int valid,
                                      const C (&from)[kLanes]) {
  using T = typename Out::T;
  T* to = static_cast<T*>(data) + offset;
  if (valid == kLanes) {
    store<kLanes>(to, from);
  } else {
#pragma unroll
    for (int i = 0; i < kLanes; ++i)
      if (i < valid) to[i] = convert<T>(from[i]);
  }
}

}  // namespace jit_elementwise
}  // namespace torchkiln::device
