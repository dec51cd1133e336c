#pragma once

// The kernels of matmul(), one namespace for each file in ops/matmul. plans.h defines which
// operands each of them supports, and its block sizes.

#include "torchkiln/kernels/matmul.h"

namespace torchkiln::gemm {

namespace sm90 {
/// Requires compute capability 9.0. `multiprocessors`: SMs of the GPU.
Status matmul(const Matmul& arguments, int multiprocessors, CUstream_st* stream);

/// Computes a product with a gate in the epilogue.
Status matmul_gate(const Matmul& arguments, int multiprocessors, CUstream_st* stream);
Status matmul_gate(const GateGradient& arguments, int multiprocessors, CUstream_st* stream);
}  // namespace sm90

namespace tensor_core {
/// Requires half precision, and code compiled for 8.0 or later.
Status matmul(const Matmul& arguments, CUstream_st* stream);
}  // namespace tensor_core

namespace simt {
Status matmul(const Matmul& arguments, CUstream_st* stream);
}  // namespace simt

}  // namespace torchkiln::gemm
