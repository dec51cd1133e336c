#pragma once

// Tensor maps: what the copy engine of compute capability 9.0 knows of a tensor in memory, so that
// one thread can copy a whole box of it. The driver makes them; it is asked through the runtime, so
// that nothing links against it.

#include <cudaTypedefs.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "torchkiln/core/status.h"

namespace torchkiln::gemm {

/// Bytes of a row of a box: with the 128-byte swizzle, the 16-byte chunk c of row r lies at chunk
/// c ^ (r % 8), so that eight rows are read or written without a conflict in either direction.
inline constexpr int kSwizzleBytes = 128;

/// Where a chunk of 16 bytes of a box lies, counted in bytes from its start.
__device__ __forceinline__ int swizzled(int row, int chunk) {
  return row * kSwizzleBytes + ((chunk ^ (row % 8)) * 16);
}

/// Matrices in memory whose inner dimension is adjacent; strides count elements.
struct MapShape {
  const void* data;
  int64_t inner;
  int64_t outer;
  int64_t batch;
  int64_t outer_stride;
  int64_t batch_stride;
};

/// What the copy engine asks for: 16-byte steps, and coordinates of 32 bits.
inline bool fits_tensor_map(const MapShape& shape, size_t element) {
  const auto whole = [&](int64_t elements) {
    const int64_t bytes = elements * static_cast<int64_t>(element);
    return bytes % 16 == 0 && bytes > 0 && bytes < (int64_t{1} << 40);
  };
  return reinterpret_cast<uintptr_t>(shape.data) % 16 == 0 && whole(shape.outer_stride) &&
         whole(shape.batch_stride) && shape.inner < INT32_MAX && shape.outer < INT32_MAX &&
         shape.batch < INT32_MAX;
}

/// A map for boxes of kSwizzleBytes by `outer_box`. What lies outside the matrices is read as zero
/// and not written.
template <class T>
Status make_tensor_map(CUtensorMap& map, const MapShape& shape, int outer_box) {
  static const auto encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    constexpr unsigned kSince = 12000;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, kSince,
                                         cudaEnableDefault, &found) != cudaSuccess ||
        found != cudaDriverEntryPointSuccess) {
      entry = nullptr;
    }
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(entry);
  }();
  if (encode == nullptr) return {"the driver has no cuTensorMapEncodeTiled; update it"};
  constexpr auto kType = std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                   : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(shape.inner),
                              static_cast<cuuint64_t>(shape.outer),
                              static_cast<cuuint64_t>(shape.batch)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(shape.outer_stride) * sizeof(T),
                                static_cast<cuuint64_t>(shape.batch_stride) * sizeof(T)};
  const cuuint32_t box[] = {kSwizzleBytes / sizeof(T), static_cast<cuuint32_t>(outer_box), 1};
  const cuuint32_t steps[] = {1, 1, 1};
  const CUresult result =
      encode(&map, kType, 3, const_cast<void*>(shape.data), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return {result == CUDA_SUCCESS ? nullptr : "cuTensorMapEncodeTiled refused a tensor"};
}

}  // namespace torchkiln::gemm
