#pragma once

// Sums over a moving window of each row: parameters and launchers, for the CPU and for CUDA.

#include "torchkiln/core/dtype.h"

struct CUstream_st;

namespace PACKAGE {
namespace OPNAME_parts {

/// `rows` rows without gaps. out[i] is the sum of `window` adjacent elements of x, of which the
/// first is x[i - before]; what lies outside of the row counts as 0.
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

/// For the rows begin <= row < end.
TORCHKILN_EXPORT torchkiln::Status OPNAME(const OPNAME_parts::Windows& arguments, int64_t begin,
                                          int64_t end);

}  // namespace cpu

namespace cuda {

/// The same on the current device, queued on `stream`.
TORCHKILN_EXPORT torchkiln::Status OPNAME(const OPNAME_parts::Windows& arguments,
                                          CUstream_st* stream);

}  // namespace cuda
}  // namespace PACKAGE
