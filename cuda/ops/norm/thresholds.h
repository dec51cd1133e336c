#pragma once

// The sizes from which one kernel of norms is faster than another, with the times that were
// measured on an H100. Other GPUs use the same numbers without measurements. choose.h reads them;
// the tables of plans are at the top of forward.cu and backward.cu.

#include <limits>

#include "torchkiln/device/alignment.h"
#include "torchkiln/kernels/norm.h"

namespace torchkiln::cuda::thresholds {

using namespace device;

inline constexpr int64_t kKiB = 1 << 10;
inline constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

// Slabs, forward: fewest rows per team. A team starts with an empty ring; from eight rows on,
// filling it costs less than slabs save.
inline constexpr int64_t kFewestRowsOfSlabTeam = 8;

/// Longer rows, in bytes, are faster in slabs, where weight and bias are read once. Shorter rows
/// are faster in the registers of a team, which reads both from L2 for each row. RMS norm in half
/// precision reads half as many parameters, so slabs gain only where rows are read element by
/// element. Times of layer norm with slabs, and without slabs in parentheses: 1335 x 50257 in
/// float32 210 us (459 us), 512 x 262143 in bfloat16 215 us (281 us), an unaligned slice of 8192 x
/// 16384 in bfloat16 225 us (590 us).
inline int64_t most_bytes_without_slabs(const Norm& p, Alignment alignment) {
  const bool adds = p.residual != nullptr;
  const bool is_half = p.dtype != Dtype::float32;
  if (alignment == Alignment::scalar) return (is_half ? 7 : 16) * kKiB;
  if (is_half && !p.centered) return kNever;
  if (alignment == Alignment::shared_offset) return (is_half ? 64 : adds ? 128 : 32) * kKiB;
  if (adds || !p.centered) return 256 * kKiB;
  return (is_half ? 128 : 64) * kKiB;
}

// Few rows, backward. Both tensors fit in L2, so reading them twice costs less than a second kernel
// for partial sums. Up to 16 MiB per tensor: two tensors fill 32 of the 50 MiB of an H100. With
// more than 2,048 rows, a thread would sum too many of them, unless they are short.
inline constexpr int64_t kMostFewRows = 2048;
inline constexpr int64_t kMostFewBytes = 16 << 20;
// Calls with more rows, or with rows that are read element by element, also gain if the second read
// takes less time than streaming adds: a second kernel (3 us), and the time to fill the rings. A
// single bfloat16 number took 15 us streamed.
inline constexpr int64_t kMostFewElements = 1 << 20;

// Bulk copies, backward. 64 to 96 KiB in flight per SM are enough to copy at full bandwidth. Rows
// of 1 to 16 KiB take 11 to 31 % less time than streamed rows, in bfloat16 with 4,096 and 8,192
// columns.
inline constexpr int kBulkBytesInFlight = 96 << 10;

// Slabs, backward. Times of layer norm in bfloat16 with slabs, and without slabs in parentheses:
// 2671 x 50257 314 us (569 us), 512 x 262143 352 us (685 us), 67 x 1000003 176 us (701 us).

/// Shorter rows, in bytes, are split among blocks if they cannot be streamed: a slab would have too
/// few columns.
inline constexpr int64_t kFewestSlabBytes = 3 * kKiB;

/// Fewest bytes per row for which slabs are faster than streaming. Aligned rows are streamed by up
/// to two blocks. With grad_sum, which adds a tensor to each ring of slabs, streaming by up to
/// eight blocks is faster. Layer norm in half precision keeps 2 x 32 column sums per thread, so
/// among rows with an offset it streams only short ones.
inline int64_t fewest_bytes_of_slabs(const NormBackward& p, Alignment alignment) {
  const bool is_half = p.dtype != Dtype::float32;
  if (alignment == Alignment::vector) return (p.grad_sum == nullptr ? 64 : 256) * kKiB;
  if (is_half && p.centered) return kFewestSlabBytes;
  return (is_half ? 12 : 40) * kKiB;
}

// Fewest rows per run, the rows of equal offset that slabs read in vectors. With shorter runs,
// reading element by element is faster.
inline constexpr int kFewestRowsOfSlabRun = 16;
// Constants for estimating a plan's time. kWaitBytesOfSlabRow: bytes that a block could copy while
// it waits for the other blocks. kRunRows*: rows that a team could copy in the time between two
// runs, in which backward writes column sums.
inline constexpr int64_t kWaitBytesOfSlabRow = 2 << 10;
inline constexpr int kRunRowsForward = 2;
inline constexpr int kRunRowsBackward = 16;

}  // namespace torchkiln::cuda::thresholds
