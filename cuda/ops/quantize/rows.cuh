#pragma once

// Rows in E4M3 with a scale for each 128 elements: one read of x, no shared memory. tiles.cuh also
// writes the transposed matrix.

#include "patch.cuh"

namespace torchkiln::fp8 {
namespace {

/// Rows of a patch. With 8, a thread needs 164 registers, so that one block runs per SM.
inline constexpr int kRows = 4;

/// A patch per 16 lanes. Adjacent patches of a block are next to each other in the rows: a block
/// reads 2048 adjacent elements of each of its rows.
template <class Reader, bool aligned>
__global__ void __launch_bounds__(kThreads) quantize_rows(Quantize p, Reader reader) {
  device::wait_for_previous_kernel();
  const int64_t blocks = p.column_blocks();
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kPatches + threadIdx.x / kLanes;
  const int64_t first_row = index / blocks * kRows;
  const int64_t column = index % blocks * kScaledElements + threadIdx.x % kLanes * kSide;
  Patch<Reader, kRows> patch;
  patch.template load<aligned>(reader, p, first_row, column);
  float magnitude[kRows], unused[kSide];
  patch.template magnitudes<false>(false, magnitude, unused);
  const bool infinite = __any_sync(kAllLanes, any_infinite(magnitude));
  if (infinite) patch.template magnitudes<false>(true, magnitude, unused);
  patch.drop_converted();
  largest_of_lanes<kLanes>(magnitude);
  store_rows<aligned>(p, patch, magnitude, infinite, first_row, column);
}

template <bool aligned, class Reader>
Status launch_rows_of(const Reader& reader, const Quantize& p, cudaStream_t stream) {
  const int64_t patches = device::ceil_div(p.rows, kRows) * p.column_blocks();
  const int64_t blocks = device::ceil_div(patches, kPatches);
  if (blocks > device::kMaxGridX) return {"x has too many elements"};
  const device::Grid grid{dim3(static_cast<unsigned>(blocks)), dim3(kThreads)};
  return device::launch_overlapped(&quantize_rows<Reader, aligned>, grid, stream, p, reader);
}

}  // namespace
}  // namespace torchkiln::fp8
