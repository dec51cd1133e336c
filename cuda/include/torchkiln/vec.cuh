#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "torchkiln/dtype.h"

namespace torchkiln {

template <>
struct DtypeOf<__half> {
  static constexpr Dtype value = Dtype::float16;
};
template <>
struct DtypeOf<__nv_bfloat16> {
  static constexpr Dtype value = Dtype::bfloat16;
};

/// dispatch for the types that the elementwise kernels are made for.
template <class Body>
Status dispatch_floating(Dtype dtype, const Body& body) {
  return dispatch<float, double, __half, __nv_bfloat16>(dtype, body);
}

/// The widest access of one thread.
inline constexpr int kVectorBytes = 16;

/// How many T one 16-byte access holds.
template <class T>
inline constexpr int kVectorLanes = kVectorBytes / static_cast<int>(sizeof(T));

/// N elements that move in accesses of up to 16 bytes.
template <class T, int N>
struct alignas(N * sizeof(T) < kVectorBytes ? N * sizeof(T) : kVectorBytes) Vec {
  T lane[N];
};

template <class C, class T>
__device__ __forceinline__ C convert(T value) {
  return static_cast<C>(value);
}
template <>
__device__ __forceinline__ __nv_bfloat16 convert<__nv_bfloat16, float>(float value) {
  return __float2bfloat16_rn(value);
}
template <>
__device__ __forceinline__ __half convert<__half, float>(float value) {
  return __float2half_rn(value);
}

/// Loads N adjacent elements, `from` aligned to 16 bytes or, where they are fewer, to themselves.
template <int N, class T>
__device__ __forceinline__ Vec<T, N> load_vector(const T* from) {
  return *reinterpret_cast<const Vec<T, N>*>(from);
}

/// Rounds N adjacent elements to T and stores them.
template <int N, class C, class T>
__device__ __forceinline__ void store(T* to, const C (&from)[N]) {
  Vec<T, N> vector;
#pragma unroll
  for (int i = 0; i < N; ++i) vector.lane[i] = convert<T>(from[i]);
  *reinterpret_cast<Vec<T, N>*>(to) = vector;
}

inline bool aligned(const void* pointer, size_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

}  // namespace torchkiln
