#pragma once

// Selects the kernel for a product of matrices, and for a product with a gate: matmul.cu has the
// table. Includes no header of CUDA.

#include <optional>

#include "detail/gemm/capability.h"
#include "detail/gemm/plans.h"

namespace torchkiln::cuda {

using namespace device;
using gemm::Blocks;

/// Least k for which sm90 is faster than cuBLAS and torch's kernels for the epilogue. Measured on
/// an H200. Plain products take the same time (0.98 to 1.03). A fused epilogue saves a pass over
/// memory if the multiplications of a tile take as long as the epilogue of the previous tile: its
/// three warps take 8 us for a residual and 18 us for gelu, and the multiplications with k = 1024
/// take 12 us.
inline constexpr int64_t kLeastDepth = 512;  // residual alone, or relu
inline constexpr int64_t kLeastDepthOfOthers = 2048;

/// Least k for which one kernel for a product and a gate is faster than two. Microseconds on an
/// H100 with 8192 rows; "cuBLAS" is cuBLAS plus a kernel for the gate. Forward also writes gate and
/// up for backward.
///
///   k      results   forward   cuBLAS   backward   cuBLAS
///   1024   2816          151      189        193      174
///   2048   5632          556      619        454      460
///   4096   14336        2707     2996       1591     1870
///
/// The finishers of backward read gate and up, which takes longer than a product with k = 1024.
inline constexpr int64_t kLeastDepthOfGate = 512;
inline constexpr int64_t kLeastDepthOfGateGradient = 2048;

/// Least share of the computed elements that must be inside the result, in percent.
inline constexpr int64_t kLeastPercentInside = 85;

/// Whether tiles of 128 by 256 keep the SMs busy. Two conditions: at least two rounds of tiles per
/// SM, because no multiplications hide the epilogue of the last round; and most of the computed
/// elements inside the result.
inline bool fills(const Matmul& p, int64_t multiprocessors) {
  using namespace gemm::sm90;
  const int64_t tiles = gemm::count_tiles(p, kTileRows, kTileColumns);
  const int64_t rounds = ceil_div(tiles, multiprocessors);
  const int64_t results = p.m * p.n * p.batch;
  return rounds > 1 &&
         results * 100 >= kLeastPercentInside * rounds * multiprocessors * kTileRows * kTileColumns;
}

/// Whether sm90 is faster than cuBLAS. Relu counts as an epilogue, because cuBLASLt's fused relu
/// turns NaN into 0 and is not used.
inline bool beats_library(const Matmul& p, const Device& device) {
  const bool is_none = p.activation == kActivation<None>;
  const bool is_relu = p.activation == kActivation<Relu>;
  if (p.residual == nullptr && is_none) return false;
  return p.k >= (is_none || is_relu ? kLeastDepth : kLeastDepthOfOthers) &&
         fills(p, device.multiprocessors);
}

/// A kernel and its blocks. cuBLAS chooses its own blocks.
struct MatmulPlan {
  MatmulKernel kernel;
  Blocks blocks;

  const char* why() const {
    constexpr const char* kWhys[] = {
        "Tiles by warpgroups: the epilogue of a tile runs beside the products of the next one.",
        "Half precision without warpgroup products, or operands that TMA cannot read.",
        "float32 and float64, which tensor cores would round.",
        "No epilogue that saves a pass, or too few products to hide it; or no half precision."};
    return kWhys[static_cast<int32_t>(kernel)];
  }
};

/// The plan of `kernel`; nullopt if it does not support the operands or this GPU.
inline std::optional<MatmulPlan> plan_of(const Matmul& p, MatmulKernel kernel,
                                         const Device& device) {
  const bool is_half = size_of(p.dtype) == 2;
  switch (kernel) {
    case MatmulKernel::sm90:
      if (!is_half || !gemm::has_sm90(device) || !gemm::sm90::fits(p)) return std::nullopt;
      return MatmulPlan{kernel, gemm::sm90::blocks_of(p, device.multiprocessors)};
    case MatmulKernel::tensor_core:
      if (!is_half || !device.runs_80_code) return std::nullopt;
      return MatmulPlan{kernel, gemm::tensor_core::blocks_of(p, gemm::tensor_core::orders_of(p))};
    case MatmulKernel::simt:
      return MatmulPlan{kernel, gemm::simt::blocks_of(p)};
    case MatmulKernel::library:
      break;
  }
  return MatmulPlan{MatmulKernel::library, {}};
}

inline MatmulPlan choose(const Matmul& p, bool has_library, const Device& device) {
  const auto sm90 = plan_of(p, MatmulKernel::sm90, device);
  if (sm90 && (!has_library || beats_library(p, device))) return *sm90;
  if (has_library) return *plan_of(p, MatmulKernel::library, device);
  if (const auto plan = plan_of(p, MatmulKernel::tensor_core, device)) return *plan;
  return *plan_of(p, MatmulKernel::simt, device);
}

/// The blocks of one kernel for a product and a gate; nullopt if two kernels take less time.
inline std::optional<Blocks> choose_gate(const Matmul& p, const Device& device) {
  if (p.k < kLeastDepthOfGate || !gemm::has_sm90(device) || !gemm::sm90::fits_gate(p) ||
      !fills(p, device.multiprocessors))
    return std::nullopt;
  return gemm::sm90::blocks_of(p, device.multiprocessors);
}
inline std::optional<Blocks> choose_gate(const GateGradient& p, const Device& device) {
  if (p.product.k < kLeastDepthOfGateGradient || !gemm::has_sm90(device) ||
      !gemm::sm90::fits_gate(p) || !fills(p.product, device.multiprocessors))
    return std::nullopt;
  return gemm::sm90::blocks_of(p.product, device.multiprocessors);
}

}  // namespace torchkiln::cuda
