#pragma once

// The kernels behind matmul(), each in a file of its name in ops/matmul. plans.h has the operands
// that they take, and their blocks.

#include "torchkiln/kernels/matmul.h"

namespace torchkiln::gemm {

namespace sm90 {
/// Runs on compute capability 9.0 only, on this many SMs.
Status matmul(const Matmul& arguments, int multiprocessors, CUstream_st* stream);

/// matmul() with a gate in the epilogue.
Status matmul_gate(const Matmul& arguments, int multiprocessors, CUstream_st* stream);
Status matmul_gate(const GateGradient& arguments, int multiprocessors, CUstream_st* stream);
}  // namespace sm90

namespace tensor_core {
/// Half precision only, in code for 8.0 or later.
Status matmul(const Matmul& arguments, CUstream_st* stream);
}  // namespace tensor_core

namespace simt {
Status matmul(const Matmul& arguments, CUstream_st* stream);
}  // namespace simt

}  // namespace torchkiln::gemm
