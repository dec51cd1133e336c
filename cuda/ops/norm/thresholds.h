#pragma once

// Where one kernel of norms becomes faster than another: numbers for an H100, with the times that
// were measured there. They are used unmeasured on other GPUs. choose.h reads them; the tables of
// plans are at the top of forward.cu and backward.cu.

#include <limits>

#include "torchkiln/device/alignment.h"
#include "torchkiln/kernels/norm.h"

namespace torchkiln::cuda::thresholds {

using namespace device;

inline constexpr int64_t kKiB = 1 << 10;
inline constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

// Slabs, forward: fewest rows of a team. Its blocks begin with an empty ring; eight rows outweigh
// the time to fill it.
inline constexpr int64_t kFewestRowsOfSlabTeam = 8;

/// Rows of more bytes are faster in slabs, where weight and bias are read once. Shorter ones are
/// faster in the registers of a team, which reads both again for each row, from L2. RMS norm in
/// half precision reads half as many parameters and gains only where rows are read element by
/// element. Layer norm in slabs, and without them in parentheses: 1335 x 50257 in float32 210 us
/// (459 us), 512 x 262143 in bfloat16 215 us (281 us), a slice of 8192 x 16384 in bfloat16, whose
/// rows begin anywhere, 225 us (590 us).
inline int64_t most_bytes_without_slabs(const Norm& p, Alignment alignment) {
  const bool adds = p.residual != nullptr;
  const bool is_half = p.dtype != Dtype::float32;
  if (alignment == Alignment::scalar) return (is_half ? 7 : 16) * kKiB;
  if (is_half && !p.centered) return kNever;
  if (alignment == Alignment::shared_offset) return (is_half ? 64 : adds ? 128 : 32) * kKiB;
  if (adds || !p.centered) return 256 * kKiB;
  return (is_half ? 128 : 64) * kKiB;
}

// Few rows, backward: both tensors stay in L2, so reading them twice costs less than partial sums
// that a second kernel waits for. Up to 16 MiB per tensor: two of them fill 32 of the 50 MiB of an
// H100. With more than 2,048 rows a thread has too many to sum, unless they are short.
inline constexpr int64_t kMostFewRows = 2048;
inline constexpr int64_t kMostFewBytes = 16 << 20;
// More rows, and rows that are read element by element, gain while two reads take less time than a
// second kernel, 3 us, and rings that begin empty: 1 x 1 in bfloat16 took 15 us streamed.
inline constexpr int64_t kMostFewElements = 1 << 20;

// Bulk copies, backward: 64 to 96 KiB in flight per SM suffice for the speed of a copy. Rows of 1
// to 16 KiB take 11 to 31 % less time than streamed ones, in bfloat16 with 4,096 and 8,192 columns.
inline constexpr int kBulkBytesInFlight = 96 << 10;

// Slabs, backward. Layer norm in bfloat16 with slabs, and without them in parentheses: 2671 x 50257
// 314 us (569 us), 512 x 262143 352 us (685 us), 67 x 1000003 176 us (701 us).

/// Rows of fewer bytes are split, if they cannot be streamed: a slab would have too few columns.
inline constexpr int64_t kFewestSlabBytes = 3 * kKiB;

/// Fewest bytes of rows that are faster in slabs than streamed. Aligned rows are streamed by up to
/// two blocks, or by eight with grad_sum, which is one more tensor in the ring of each slab. Layer
/// norm in half precision keeps 2 x 32 column sums per thread, so it streams only short rows with
/// an offset.
inline int64_t fewest_bytes_of_slabs(const NormBackward& p, Alignment alignment) {
  const bool is_half = p.dtype != Dtype::float32;
  if (alignment == Alignment::vector) return (p.grad_sum == nullptr ? 64 : 256) * kKiB;
  if (is_half && p.centered) return kFewestSlabBytes;
  return (is_half ? 12 : 40) * kKiB;
}

// Runs of rows with the same offset from a 16-byte boundary, which slabs read in vectors. Runs of
// fewer rows take longer than single elements.
inline constexpr int kFewestRowsOfSlabRun = 16;
// The estimate of a plan's time: bytes that a block could copy while it waits for other blocks, and
// rows that a team could copy in the time between two runs, where backward writes column sums.
inline constexpr int64_t kWaitBytesOfSlabRow = 2 << 10;
inline constexpr int kRunRowsForward = 2;
inline constexpr int kRunRowsBackward = 16;

}  // namespace torchkiln::cuda::thresholds
