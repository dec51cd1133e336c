#pragma once

// Common to forward and backward: the group and the tokens of a block.
//
//   block          0          1        ...   groups - 1     groups        ...
//   token      |  group 0  |  group 1  | ... | last group |
//   0 ...      |<-team 0-->|<-team 0-->|     |            |     the next tokens
//              |<-team 1-->|<-team 1-->|     |            |
//
// The teams of a block process the same group in adjacent tokens, so they share the weight. Blocks
// that run at the same time read adjacent groups.

#include "choose.h"
#include "detail/rowwise/tile.cuh"
#include "torchkiln/core/activations.h"
#include "torchkiln/core/workspace.h"
#include "torchkiln/device/fast_divide.cuh"

namespace torchkiln::cuda {

using namespace device;
using namespace rowwise;
namespace {

/// The group of a block or cluster, and the index of that block or cluster among those of the
/// group.
struct GroupBlock {
  int64_t group;
  int64_t index;

  __device__ __forceinline__ GroupBlock(const Divisor& groups, int64_t block) {
    const auto own = static_cast<uint32_t>(block);
    const uint32_t quotient = groups.quotient(own);
    group = own - quotient * groups.divisor();
    index = quotient;
  }
};

/// The offset of a group's first element in [tokens, groups, columns]. Tokens are `stride` elements
/// apart.
template <class Problem>
__device__ __forceinline__ int64_t offset_of(const Problem& p, int64_t token, int64_t group,
                                             int64_t stride) {
  return token * stride + group * p.columns;
}

}  // namespace

/// Launches of the plans of choose.h, compiled per dtype in files of their own.
template <class T>
struct GatedNormForwardByDtype {
  static Status launch(const GatedNorm& p, const GatedNormPlan& plan, CUstream_st* stream);
};

template <class T>
struct GatedNormBackwardByDtype {
  static Status launch(const GatedNormBackward& p, const GatedGradientPlan& plan, Allocate allocate,
                       CUstream_st* stream);
};

}  // namespace torchkiln::cuda
