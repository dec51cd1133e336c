#pragma once

// Rows in E4M3 with a scale for each 128 elements: one read of x, no shared memory. tiles.cuh also
// writes the transposed matrix.

#include "patch.cuh"

namespace torchkiln::fp8 {
namespace {

inline constexpr int kRows = 4;  // per patch

/// Quantises one patch per 16 lanes. The patches of a block have the same rows and adjacent
/// columns: a block reads 2048 adjacent elements of each row. `blocks` divides by
/// p.column_blocks().
template <class Reader, bool aligned>
__global__ void __launch_bounds__(kThreads)
    quantize_rows(Quantize p, Reader reader, device::Divisor blocks) {
  device::wait_for_previous_kernel();
  const uint32_t index = blockIdx.x * kPatches + threadIdx.x / kLanes;
  const uint32_t row_of_patches = blocks.quotient(index);
  const int64_t first_row = int64_t{row_of_patches} * kRows;
  const int64_t column = int64_t{index - row_of_patches * blocks.divisor()} * kScaledElements +
                         threadIdx.x % kLanes * kSide;
  const int inside = rows_inside<kRows>(p, first_row, column);
  Patch<typename Reader::T, kRows> patch;
  patch.template load<aligned>(reader, p, first_row, column, inside);
  const float magnitude = largest_of_row<kLanes / 2>(patch.measure().row);
  store_rows<aligned>(p, patch, exponent_for(magnitude), first_row, column, inside);
}

template <bool aligned, class Reader>
Status launch_rows_of(const Reader& reader, const Quantize& p, cudaStream_t stream) {
  static_assert(Reader::kResults == 1, "a patch for each");
  const int64_t patches = device::ceil_div(p.rows, kRows) * p.column_blocks();
  if (patches > device::kMaxGridX - kPatches) return {"x has too many elements"};
  const int64_t blocks = device::ceil_div(patches, kPatches);
  const device::Grid grid{dim3(static_cast<unsigned>(blocks)), dim3(kThreads)};
  return device::launch_overlapped(&quantize_rows<Reader, aligned>, grid, stream, p, reader,
                                   device::Divisor(static_cast<uint32_t>(p.column_blocks())));
}

}  // namespace
}  // namespace torchkiln::fp8
