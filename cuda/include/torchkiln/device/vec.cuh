#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "torchkiln/core/dtype.h"
#include "torchkiln/device/device.h"

namespace torchkiln {

template <>
struct DtypeOf<__half> {
  static constexpr Dtype value = Dtype::float16;
};
template <>
struct DtypeOf<__nv_bfloat16> {
  static constexpr Dtype value = Dtype::bfloat16;
};

}  // namespace torchkiln

namespace torchkiln::device {

/// dispatch() over the types that the elementwise kernels are compiled for.
template <class Body>
Status dispatch_floating(Dtype dtype, const Body& body) {
  return dispatch<float, double, __half, __nv_bfloat16>(dtype, body);
}

/// Calls body(TypeTag<W>{}) with the type of a weight or bias for elements of type T: T or, for
/// half precision, float32.
#pragma nv_exec_check_disable
template <class T, class Body>
__host__ __device__ __forceinline__ auto with_parameter_type(Dtype dtype, const Body& body) {
  if constexpr (sizeof(T) == 2) {
    if (dtype == Dtype::float32) return body(TypeTag<float>{});
  }
  return body(TypeTag<T>{});
}

/// Elements of type T per 16-byte vector.
template <class T>
inline constexpr int kVectorLanes = kVectorBytes / static_cast<int>(sizeof(T));

/// The number of elements between the last 16-byte boundary and the begin of `row`.
template <class T>
__device__ __forceinline__ int elements_past_boundary(const T* row) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(row) / sizeof(T) % kVectorLanes<T>);
}

/// N elements that are loaded and stored in accesses of up to 16 bytes.
template <class T, int N>
struct alignas(N * sizeof(T) < kVectorBytes ? N * sizeof(T) : kVectorBytes) Vec {
  T lane[N];
};

/// Sets all lanes. Half precision is stored in pairs, because nvcc would keep single elements in a
/// register each.
template <class T, int N>
__device__ __forceinline__ void fill(Vec<T, N>& vector, T value) {
  if constexpr (sizeof(T) == 2 && N % 2 == 0) {
    const uint32_t both = *reinterpret_cast<const uint16_t*>(&value) * 0x10001u;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) reinterpret_cast<uint32_t*>(&vector)[i] = both;
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) vector.lane[i] = value;
  }
}

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

/// Loads N adjacent elements. `from` is aligned to the size of the vector, at most 16 bytes.
template <int N, class T>
__device__ __forceinline__ Vec<T, N> load_vector(const T* from) {
  return *reinterpret_cast<const Vec<T, N>*>(from);
}

/// load_vector() through the read-only path: for memory that no kernel writes meanwhile. The
/// compiler may hoist it above stores.
template <int N, class T>
__device__ __forceinline__ Vec<T, N> load_constant(const T* from) {
  if constexpr (N * sizeof(T) == kVectorBytes) {
    const uint4 words = __ldg(reinterpret_cast<const uint4*>(from));
    return *reinterpret_cast<const Vec<T, N>*>(&words);
  } else {
    Vec<T, N> vector;
#pragma unroll
    for (int i = 0; i < N; ++i) vector.lane[i] = __ldg(from + i);
    return vector;
  }
}

/// Prefetches the 128-byte line of an address into the L2 cache.
__device__ __forceinline__ void prefetch_to_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

/// Moves the elements of type T in these words down by `past` elements, which are less than a
/// vector. Afterwards all but the last four words are valid.
template <class T, int kWords>
__device__ __forceinline__ void shift_down(uint32_t (&words)[kWords], int past) {
  // Moves by two words if bit 3 of the byte count is set, by one word if bit 2 is set, by half a
  // word if bit 1 is set. A variable array index would move the array to local memory.
  const int bytes = past * static_cast<int>(sizeof(T));
#pragma unroll
  for (int i = 0; i < kWords - 2; ++i) words[i] = (bytes & 8) != 0 ? words[i + 2] : words[i];
  if constexpr (sizeof(T) <= 4) {
#pragma unroll
    for (int i = 0; i < kWords - 3; ++i) words[i] = (bytes & 4) != 0 ? words[i + 1] : words[i];
  }
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int i = 0; i < kWords - 4; ++i)
      words[i] = __funnelshift_r(words[i], words[i + 1], static_cast<unsigned>(bytes & 2) * 8);
  }
}

/// Loads N elements that begin `past` elements (modulo a vector) after a 16-byte boundary, through
/// the read-only path. Loads aligned vectors, one more than N elements would fill.
template <int N, class T>
__device__ __forceinline__ Vec<T, N> load_unaligned(const T* from, int past) {
  constexpr int kEach = kVectorLanes<T>;
  constexpr int kWords = N * static_cast<int>(sizeof(T)) / 4;
  static_assert(N % kEach == 0, "whole vectors");
  past %= kEach;
  uint32_t words[kWords + 4];
#pragma unroll
  for (int part = 0; part < N / kEach + 1; ++part) {
    const uint4 some = __ldg(reinterpret_cast<const uint4*>(from - past) + part);
    words[4 * part] = some.x;
    words[4 * part + 1] = some.y;
    words[4 * part + 2] = some.z;
    words[4 * part + 3] = some.w;
  }
  shift_down<T>(words, past);
  Vec<T, N> result;
#pragma unroll
  for (int i = 0; i < kWords; ++i) reinterpret_cast<uint32_t*>(&result)[i] = words[i];
  return result;
}

/// Converts a vector to the compute type. A bfloat16 is the upper half of a float: one shift or
/// mask per element.
template <class C, class T, int N>
__device__ __forceinline__ void widen(const Vec<T, N>& from, C (&to)[N]) {
  if constexpr (std::is_same_v<T, __nv_bfloat16> && std::is_same_v<C, float> && N % 2 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      const uint32_t both = reinterpret_cast<const uint32_t*>(&from)[i / 2];
      to[i] = __uint_as_float(both << 16);
      to[i + 1] = __uint_as_float(both & 0xffff0000u);
    }
  } else if constexpr (std::is_same_v<T, __half> && std::is_same_v<C, float> && N % 2 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      asm("{.reg .b16 low, high;\n"
          "mov.b32 {low, high}, %2;\n"
          "cvt.f32.f16 %0, low;\n"
          "cvt.f32.f16 %1, high;}"
          : "=f"(to[i]), "=f"(to[i + 1])
          : "r"(reinterpret_cast<const uint32_t*>(&from)[i / 2]));
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = convert<C>(from.lane[i]);
  }
}

/// Makes the compiler convert `items` again after this point. The converted floats of half
/// precision take twice the registers of the vectors, too many to keep.
template <class T, int N, int kItems>
__device__ __forceinline__ void force_reconversion(Vec<T, N> (&items)[kItems]) {
  if constexpr (sizeof(Vec<T, N>) % sizeof(uint32_t) == 0) {
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      uint32_t* words = reinterpret_cast<uint32_t*>(&items[k]);
#pragma unroll
      for (int i = 0; i < static_cast<int>(sizeof(Vec<T, N>) / sizeof(uint32_t)); ++i)
        asm volatile("" : "+r"(words[i]));
    }
  }
}

/// The elementwise maximum, in half precision two elements per instruction. NaN only if both are
/// NaN.
template <class T, int N>
__device__ __forceinline__ Vec<T, N> elementwise_max(const Vec<T, N>& a, const Vec<T, N>& b) {
  Vec<T, N> result;
  if constexpr (sizeof(T) == 2 && N % 2 == 0) {
    using Two = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      reinterpret_cast<Two*>(&result)[i] =
          __hmax2(reinterpret_cast<const Two*>(&a)[i], reinterpret_cast<const Two*>(&b)[i]);
    }
  } else if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int i = 0; i < N; ++i) result.lane[i] = __hmax(a.lane[i], b.lane[i]);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) result.lane[i] = fmax(a.lane[i], b.lane[i]);
  }
  return result;
}

/// Rounds N adjacent elements to T and stores them.
template <int N, class C, class T>
__device__ __forceinline__ void store(T* to, const C (&from)[N]) {
  Vec<T, N> vector;
#pragma unroll
  for (int i = 0; i < N; ++i) vector.lane[i] = convert<T>(from[i]);
  *reinterpret_cast<Vec<T, N>*>(to) = vector;
}

/// store() of whole 16-byte vectors to global memory, with one instruction per vector. In the loop
/// over the samples of a group norm, nvcc splits store() into stores of 2 or 4 bytes.
template <int N, class C, class T>
__device__ __forceinline__ void store_vectors(T* to, const C (&from)[N]) {
  static_assert(N * sizeof(T) % kVectorBytes == 0, "whole vectors");
  Vec<T, N> vector;
#pragma unroll
  for (int i = 0; i < N; ++i) vector.lane[i] = convert<T>(from[i]);
#pragma unroll
  for (int i = 0; i < static_cast<int>(N * sizeof(T)) / kVectorBytes; ++i) {
    const uint4 words = reinterpret_cast<const uint4*>(&vector)[i];
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(reinterpret_cast<uint4*>(to) + i), "r"(words.x), "r"(words.y), "r"(words.z),
                   "r"(words.w)
                 : "memory");
  }
}

/// store() of one 16-byte vector if `condition`. It is a predicated instruction instead of a
/// branch, so that the code after it need not wait.
template <int N, class C, class T>
__device__ __forceinline__ void store_if(bool condition, T* to, const C (&from)[N]) {
  static_assert(N * sizeof(T) == kVectorBytes, "one whole vector");
  Vec<T, N> vector;
#pragma unroll
  for (int i = 0; i < N; ++i) vector.lane[i] = convert<T>(from[i]);
  const uint4 words = *reinterpret_cast<const uint4*>(&vector);
  asm volatile(
      "{.reg .pred condition;\n"
      "setp.ne.s32 condition, %5, 0;\n"
      "@condition st.global.v4.b32 [%0], {%1, %2, %3, %4};}"
      :
      : "l"(to), "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w),
        "r"(static_cast<int>(condition))
      : "memory");
}

}  // namespace torchkiln::device
