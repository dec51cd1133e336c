#pragma once

// The kernels behind matmul(), each in a file of its name. Which one is taken: matmul.cu.

#include "torchkiln/kernels/matmul.h"

namespace torchkiln::gemm {

namespace sm90 {
/// Whether the operands are laid out as the copy engine reads them. Asks nothing of the device.
bool fits(const Matmul& arguments);
/// Only on a device of compute capability 9.0, on this many multiprocessors.
Status matmul(const Matmul& arguments, int multiprocessors, CUstream_st* stream);
}  // namespace sm90

namespace tensor_core {
/// Half precision; only where runs() says so.
bool runs();
Status matmul(const Matmul& arguments, CUstream_st* stream);
}  // namespace tensor_core

namespace simt {
Status matmul(const Matmul& arguments, CUstream_st* stream);
}  // namespace simt

}  // namespace torchkiln::gemm
