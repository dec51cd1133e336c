#pragma once

// The sum of the squares of each row: the formulas, once for the CPU and for CUDA, and their
// launchers.

#include "torchkiln/core/functors.h"
#include "torchkiln/core/layout.h"

struct CUstream_st;

namespace PACKAGE {
namespace OPNAME_parts {

/// What is summed over a row.
struct Term {
  template <class C>
  TORCHKILN_FUNCTION C operator()(C x) const {
    return x * x;
  }
};

/// The gradient for x, of the incoming one of its row.
struct Gradient {
  template <class C>
  TORCHKILN_FUNCTION C operator()(C grad, C x) const {
    return grad * (x + x);
  }
};

/// `rows` rows without gaps.
struct Rows {
  const void* x;
  void* out;
  torchkiln::Dtype dtype;
  int64_t rows;
  int64_t columns;
};

}  // namespace OPNAME_parts

namespace cpu {

/// For the rows begin <= row < end.
TORCHKILN_EXPORT torchkiln::Status OPNAME(const OPNAME_parts::Rows& arguments, int64_t begin,
                                          int64_t end);
/// For some elements; the inputs are {grad, x}, where grad has one element for each row.
TORCHKILN_EXPORT torchkiln::Status OPNAME_backward(const torchkiln::Elementwise<2>& arguments,
                                                   int64_t begin, int64_t end);

}  // namespace cpu

namespace cuda {

/// As their namesakes above, on the current device, queued on `stream`.
TORCHKILN_EXPORT torchkiln::Status OPNAME(const OPNAME_parts::Rows& arguments, CUstream_st* stream);
TORCHKILN_EXPORT torchkiln::Status OPNAME_backward(const torchkiln::Elementwise<2>& arguments,
                                                   CUstream_st* stream);

}  // namespace cuda
}  // namespace PACKAGE
