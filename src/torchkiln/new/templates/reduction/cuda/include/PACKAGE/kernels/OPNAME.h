#pragma once

// The sum of the squares of each row: the functors, which compute one element, and the launchers,
// which apply them to whole tensors. No torch: kernels take pointers, sizes and strides.

#include "torchkiln/core/functors.h"
#include "torchkiln/core/layout.h"

struct CUstream_st;

namespace PACKAGE {
namespace OPNAME_parts {

/// The term of the sum for one element. g++ compiles it for the CPU, nvcc for the GPU. C is the
/// type of the computation: float for half precision, whose sums would otherwise lose most digits.
struct Term {
  template <class C>
  TORCHKILN_FUNCTION C operator()(C x) const {
    return x * x;
  }
};

/// The gradient of x; `grad` is the incoming gradient of its row.
struct Gradient {
  template <class C>
  TORCHKILN_FUNCTION C operator()(C grad, C x) const {
    return grad * (x + x);
  }
};

/// A contiguous matrix x, and one output per row.
struct Rows {
  const void* x;
  void* out;
  torchkiln::Dtype dtype;
  int64_t rows;
  int64_t columns;
};

}  // namespace OPNAME_parts

namespace cpu {

/// Sums the rows begin <= row < end.
TORCHKILN_VISIBLE torchkiln::Status OPNAME(const OPNAME_parts::Rows& arguments, int64_t begin,
                                           int64_t end);
/// Computes the elements begin <= i < end. The inputs are {grad, x}; grad has stride 0 in a row.
TORCHKILN_VISIBLE torchkiln::Status OPNAME_backward(const torchkiln::Elementwise<2>& arguments,
                                                    int64_t begin, int64_t end);

}  // namespace cpu

namespace cuda {

/// The functions of namespace cpu on the current device, for all rows and elements, queued on
/// `stream`.
TORCHKILN_VISIBLE torchkiln::Status OPNAME(const OPNAME_parts::Rows& arguments,
                                           CUstream_st* stream);
TORCHKILN_VISIBLE torchkiln::Status OPNAME_backward(const torchkiln::Elementwise<2>& arguments,
                                                    CUstream_st* stream);

}  // namespace cuda
}  // namespace PACKAGE
