#pragma once

#include <cstddef>

#include "torchkiln/core/dtype.h"
#include "torchkiln/core/workspace.h"

struct CUstream_st;

namespace torchkiln {

/// out[o, i] = (sum over r of in[o * outer_stride + r * reduced_stride + i * inner_stride]) /
/// divisor, accumulated in float32, or in float64 if in or out is float64, and rounded once.
/// Strides count elements and may have any value; the kernels are fastest if reduced_stride or
/// inner_stride is 1.
struct Reduction {
  const void* in;
  void* out;  // [outer, inner], contiguous
  Dtype dtype;
  Dtype out_dtype;
  int64_t outer;  // outer, reduced and inner are at least 1
  int64_t reduced;
  int64_t inner;
  int64_t outer_stride;
  int64_t reduced_stride;
  int64_t inner_stride;
  double divisor;   // 1 for a sum, the number of terms for a mean
  void* workspace;  // has the size that cpu::split() returns; CUDA launchers allocate theirs
};

namespace cpu {

/// The split of a call: results are the outputs, if tasks write partial sums.
TORCHKILN_EXPORT Split split(const Reduction& arguments);

/// Runs the tasks begin <= task < end; each stores its results, or partial sums into the workspace.
TORCHKILN_EXPORT Status reduce(const Reduction& arguments, int64_t begin, int64_t end);

/// Computes the outputs begin <= i < end from the partial sums of all tasks, if there is a
/// workspace.
TORCHKILN_EXPORT Status reduce_finish(const Reduction& arguments, int64_t begin, int64_t end);

}  // namespace cpu

namespace cuda {

/// Runs on the current device, queued on `stream`: one pass over the input and, if several blocks
/// share an output, a short kernel for partial sums. No atomics.
TORCHKILN_EXPORT Status reduce(const Reduction& arguments, Allocate allocate, CUstream_st* stream);

}  // namespace cuda
}  // namespace torchkiln
