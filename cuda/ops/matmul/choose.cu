// out = activation(a b * scale + bias) + residual, and products around a gate. This file selects a
// kernel for the operands and the device; detail/gemm/variants.h lists them.
//
//   sm90          sm90.cu, sm90_gate.cu   half precision on 9.0, if it beats cuBLAS or without it
//   library       cuBLAS, by the caller   otherwise, if the caller has it
//   tensor_core   tensor_core.cu          half precision since 8.0
//   simt          simt.cu                 everything else
//
// copy_rows.cu copies operands that TMA cannot read in place.

#include "torchkiln/kernels/matmul.h"

#include "detail/gemm/capability.h"
#include "detail/gemm/variants.h"
#include "torchkiln/device/launch.cuh"

namespace torchkiln::cuda {

using namespace device;
namespace {

/// Whether the sm90 kernel was built and can run on the current device with these operands.
bool fits_sm90(const Matmul& p) {
#ifdef TORCHKILN_WITH_SM90
  return gemm::has_sm90() && gemm::sm90::fits(p);
#else
  (void)p;
  return false;
#endif
}

/// Whether tiles of 128 by 256 keep the SMs busy: at least two rounds, because nothing hides the
/// epilogue of a single round, and at least 85 % of the computed elements inside the result.
bool fills(const Matmul& p, int64_t multiprocessors) {
  constexpr int64_t kRows = 128;
  constexpr int64_t kColumns = 256;
  const int64_t tiles = ceil_div(p.m, kRows) * ceil_div(p.n, kColumns) * p.batch;
  const int64_t rounds = ceil_div(tiles, multiprocessors);
  const int64_t results = p.m * p.n * p.batch;
  constexpr int64_t kPercent = 85;
  return rounds > 1 && results * 100 >= kPercent * rounds * multiprocessors * kRows * kColumns;
}

/// Measured on an H200, relative to cuBLAS plus torch's kernels for the epilogue. Plain products
/// take the same time (0.98 to 1.03). An epilogue saves a pass over memory if the products of a
/// tile last as long as the epilogue of the previous tile: its three warps take 8 us for a residual
/// and 18 us for gelu, and the products with k = 1024 take 12 us. The relu that cuBLASLt fuses
/// turns NaN into 0.
bool beats_library(const Matmul& p) {
  const bool is_none = p.activation == kActivation<None>;
  const bool is_relu = p.activation == kActivation<Relu>;
  if (p.residual == nullptr && is_none) return false;
  const int64_t deep_enough = is_none || is_relu ? 512 : 2048;
  return p.k >= deep_enough && fills(p, current_device().multiprocessors);
}

}  // namespace

MatmulKernel choose(const Matmul& p, bool has_library) {
  const bool is_half = size_of(p.dtype) == 2;
  if (is_half && fits_sm90(p) && (!has_library || beats_library(p))) return MatmulKernel::sm90;
  if (has_library) return MatmulKernel::library;
  return is_half && gemm::tensor_core::is_available() ? MatmulKernel::tensor_core
                                                      : MatmulKernel::simt;
}

Status matmul(const Matmul& p, MatmulKernel kernel, cudaStream_t stream) {
  if (p.batch == 0 || p.m == 0 || p.n == 0) return {};
  switch (kernel) {
#ifdef TORCHKILN_WITH_SM90
    case MatmulKernel::sm90:
      if (!fits_sm90(p)) return {"this kernel does not support these operands or this device"};
      return gemm::sm90::matmul(p, current_device().multiprocessors, stream);
#endif
    case MatmulKernel::tensor_core:
      if (!gemm::tensor_core::is_available())
        return {"this kernel does not support these operands or this device"};
      return gemm::tensor_core::matmul(p, stream);
    case MatmulKernel::simt:
      return gemm::simt::matmul(p, stream);
    default:
      return {"this kernel was not built"};
  }
}

namespace {

template <class Product>
bool fits_gate(const Product& p) {
#ifdef TORCHKILN_WITH_SM90
  return gemm::has_sm90() && gemm::sm90::fits_gate(p);
#else
  (void)p;
  return false;
#endif
}

template <class Product>
Status launch_gate(const Product& p, cudaStream_t stream) {
#ifdef TORCHKILN_WITH_SM90
  return gemm::sm90::matmul_gate(p, current_device().multiprocessors, stream);
#else
  (void)p, (void)stream;
  return {"this kernel was not built"};
#endif
}

}  // namespace

/// Microseconds on an H100 with 8192 rows, and with cuBLAS plus a kernel for the gate. Forward also
/// writes gate and up for backward.
///
///   k      results   forward   cuBLAS   backward   cuBLAS
///   1024   2816          151      189        193      174
///   2048   5632          556      619        454      460
///   4096   14336        2707     2996       1591     1870
///
/// The finishers of backward read gate and up, which takes longer than a product with k = 1024.
bool gains_from_gate(const Matmul& p) {
  return p.k >= 512 && fits_gate(p) && fills(p, current_device().multiprocessors);
}

bool gains_from_gate(const GateGradient& p) {
  return p.product.k >= 2048 && fits_gate(p) && fills(p.product, current_device().multiprocessors);
}

Status matmul_gate(const Matmul& p, cudaStream_t stream) { return launch_gate(p, stream); }
Status matmul_gate(const GateGradient& p, cudaStream_t stream) { return launch_gate(p, stream); }

}  // namespace torchkiln::cuda
