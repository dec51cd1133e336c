#pragma once

// Sums over a moving window of each row: the parameters, and the launchers for the CPU and for
// CUDA. No torch: kernels take pointers and sizes.

#include "torchkiln/core/dtype.h"

struct CUstream_st;

namespace PACKAGE {
namespace OPNAME_parts {

/// Two contiguous matrices. out[i] is the sum of `window` adjacent elements of a row of x, the
/// first of which is x[i - before]. Elements beyond the ends of the row count as 0. `dtype` is that
/// of both; half precision is summed in float and rounded once.
struct Windows {
  const void* x;
  void* out;
  torchkiln::Dtype dtype;
  int64_t rows;
  int64_t columns;
  int64_t window;
  int64_t before;
};

}  // namespace OPNAME_parts

namespace cpu {

/// Computes the rows begin <= row < end.
TORCHKILN_VISIBLE torchkiln::Status OPNAME(const OPNAME_parts::Windows& arguments, int64_t begin,
                                           int64_t end);

}  // namespace cpu

namespace cuda {

/// Computes all rows on the current device, queued on `stream`.
TORCHKILN_VISIBLE torchkiln::Status OPNAME(const OPNAME_parts::Windows& arguments,
                                           CUstream_st* stream);

}  // namespace cuda
}  // namespace PACKAGE
