#pragma once

// Tensor maps: descriptions of a tensor in memory, with which one thread requests a whole box of it
// from the tensor memory accelerator (TMA) of compute capability 9.0. A function of the driver
// encodes them. The CUDA runtime looks it up, so that no library has to be linked against the
// driver.

#include <cudaTypedefs.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "detail/gemm/operands.h"
#include "torchkiln/core/status.h"

namespace torchkiln::gemm {

/// Offset in bytes of a 16-byte chunk from the start of its swizzled box.
__device__ __forceinline__ int swizzled(int row, int chunk) {
  return row * kSwizzleBytes + ((chunk ^ (row % 8)) * 16);
}

/// Encodes a map for boxes of kSwizzleBytes by `outer_box`. Elements outside the matrices read as
/// zero and are not written.
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
  // The driver's function needs a context. A new thread, such as one of autograd, has none before
  // the runtime sets its device.
  static thread_local const bool has_context = [] {
    int device = 0;
    return cudaGetDevice(&device) == cudaSuccess && cudaSetDevice(device) == cudaSuccess;
  }();
  if (!has_context) return {"the device of this thread cannot be set", StatusCode::launch_failed};
  const CUresult result =
      encode(&map, kType, 3, const_cast<void*>(shape.data), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return {};
  return {"cuTensorMapEncodeTiled refused a tensor", StatusCode::launch_failed};
}

}  // namespace torchkiln::gemm
