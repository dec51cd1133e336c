#pragma once

// Selects the kernel for row sums, see rows.cuh.

#include "detail/reduce/common.cuh"
#include "detail/reduce/row_loads.cuh"
#include "torchkiln/device/alignment.h"
#include "torchkiln/device/warp.cuh"

namespace torchkiln::reduce {
using namespace device;
namespace rows {

inline constexpr int kThreads = 256;
// Resident blocks per SM: 4 x 256 threads x 8 loads x 16 B = 128 KiB in flight, three times what
// hides the latency.
inline constexpr int kBlocksPerMultiprocessor = 4;
// Rows in flight per thread of a packed kernel.
inline constexpr int kPackedRows = 8;
inline constexpr int kTileBytes = 16 * 1024;
// Longest row of a staged tile of 16 KiB: at least 16 of 256 threads sum it.
inline constexpr int kStagedRowBytes = kTileBytes / 16;
// Bytes of a row per thread if there are many rows: its loads are all in flight together. Longer
// shares per thread would let some SMs finish their last rows late.
inline constexpr int kThreadRowBytes = kLoads * kVectorBytes;
// Below 2 KiB, half of a 256-thread block would have no load: such rows get a warp.
inline constexpr int kBlockRowBytes = 2 * 1024;
// Longest row that one block sums. Longer rows are split into parts of at least kMinPartBytes, and
// a second kernel adds the parts.
inline constexpr int64_t kSinglePassBytes = 64 * 1024;
inline constexpr int64_t kMinPartBytes = 16 * 1024;

enum class Kind { packed_vectors, packed_elements, staged, warp_per_row, block_per_row };

/// How rows are summed. Depends only on shape, strides, alignment and device.
struct Plan {
  Kind kind;
  int threads = kThreads;  // per block
  int64_t parts = 1;       // per row
  int64_t part_length = 0;
};

/// A grid [outer, inner] of rows, with a stride of `in` along each dimension.
struct Shape {
  const void* in;
  int64_t size_of_element;
  int64_t outer;
  int64_t inner;
  int64_t length;
  int64_t outer_stride;
  int64_t inner_stride;
  int64_t stride;

  int64_t count() const { return outer * inner; }

  /// Whether every row consists of whole 16-byte vectors.
  bool in_vectors() const {
    return stride == 1 &&
           rows_in_vectors(in, kVectorBytes / size_of_element,
                           {length, outer == 1 ? 0 : outer_stride, inner == 1 ? 0 : inner_stride});
  }

  /// Whether each row begins where the previous one ends.
  bool is_dense() const {
    return stride == 1 &&
           ((inner == 1 && outer_stride == length) || (outer == 1 && inner_stride == length));
  }
};

inline Plan make_plan(const Shape& shape) {
  const int64_t bytes = shape.length * shape.size_of_element;
  // Few rows stay unpacked if they are dense: with eight rows per thread most SMs would be idle.
  const bool packs = shape.in_vectors() && bytes <= kWarpLanes * kVectorBytes;
  const bool many = shape.count() >= int64_t{current_device().multiprocessors} * kPackedRows * 8;
  if (packs && (many || !shape.is_dense())) return {Kind::packed_vectors};
  if (shape.is_dense() && bytes <= kStagedRowBytes) return {Kind::staged};
  if (shape.length <= kWarpLanes) return {Kind::packed_elements};
  const int64_t multiprocessors = current_device().multiprocessors;
  const bool warps_fill = shape.count() >= multiprocessors * 32;
  if (bytes <= kBlockRowBytes || (warps_fill && bytes <= kWarpLanes * kThreadRowBytes))
    return {Kind::warp_per_row};
  Plan plan{Kind::block_per_row, kThreads, 1, shape.length};
  while (warps_fill && bytes <= plan.threads / 2 * kThreadRowBytes) plan.threads /= 2;
  if (bytes <= kSinglePassBytes) return plan;
  plan.parts = parts_filling_waves(shape.count(), ceil_div(bytes, kMinPartBytes),
                                   multiprocessors * kBlocksPerMultiprocessor);
  if (plan.parts == 1) return plan;
  constexpr int64_t kMultiple = 256;  // keeps the parts of an aligned row aligned
  plan.part_length = ceil_div(ceil_div(shape.length, plan.parts), kMultiple) * kMultiple;
  plan.parts = ceil_div(shape.length, plan.part_length);
  return plan;
}

inline size_t partial_bytes(const Shape& shape, const Plan& plan) {
  return plan.parts == 1 ? 0 : static_cast<size_t>(shape.count() * plan.parts) * sizeof(double);
}

}  // namespace rows
}  // namespace torchkiln::reduce
