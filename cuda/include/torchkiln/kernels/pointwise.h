#pragma once

#include "torchkiln/layout.h"

struct CUstream_st;

namespace torchkiln {
namespace cpu {

/// out[i] = a[i] + b[i] for begin <= i < end. Ranges may run on different threads.
TORCHKILN_EXPORT Status add(const Elementwise<2>& arguments, int64_t begin, int64_t end);

}  // namespace cpu

namespace cuda {

/// out = a + b on the current device, queued on `stream`.
TORCHKILN_EXPORT Status add(const Elementwise<2>& arguments, CUstream_st* stream);

}  // namespace cuda
}  // namespace torchkiln
