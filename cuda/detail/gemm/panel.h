#pragma once

// The layout of an operand's panels in shared memory. Includes no header, so that torchkiln.jit
// compiles wgmma.cuh.

namespace torchkiln::gemm {

/// Bytes per row of a box. In the 128-byte swizzle the 16-byte chunk c of row r lies at position c
/// ^ (r % 8), so that eight rows are read or written without bank conflicts in either direction.
inline constexpr int kSwizzleBytes = 128;

/// The contiguous dimension of an operand: the dimension that is summed (k), or the one that it
/// shares with the result (rows of A, columns of B).
enum class Major { k, outer };

}  // namespace torchkiln::gemm
