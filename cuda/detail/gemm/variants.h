#pragma once

// The kernels behind matmul(), each in a file of its name in ops/matmul; choose.cu selects one.

#include "torchkiln/kernels/matmul.h"

namespace torchkiln::gemm {

namespace sm90 {
/// Whether TMA can read the operands in place. Does not query the device.
bool fits(const Matmul& arguments);
/// Runs on compute capability 9.0 only, on this many SMs.
Status matmul(const Matmul& arguments, int multiprocessors, CUstream_st* stream);

/// fits() and matmul() for products with a gate in the epilogue.
bool fits_gate(const Matmul& arguments);
bool fits_gate(const GateGradient& arguments);
Status matmul_gate(const Matmul& arguments, int multiprocessors, CUstream_st* stream);
Status matmul_gate(const GateGradient& arguments, int multiprocessors, CUstream_st* stream);
}  // namespace sm90

namespace tensor_core {
/// Whether the compiled code has the tensor-core instructions. Half precision only.
bool is_available();
Status matmul(const Matmul& arguments, CUstream_st* stream);
}  // namespace tensor_core

namespace simt {
Status matmul(const Matmul& arguments, CUstream_st* stream);
}  // namespace simt

}  // namespace torchkiln::gemm
