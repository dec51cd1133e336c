#pragma once

// Products of a warpgroup, four warps that multiply together (compute capability 9.0, compiled for
// 90a): 64 rows of A by 256 columns of B, both in shared memory, added to sums in registers.
// Products run asynchronously; commit() and wait() work as for asynchronous copies.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "detail/gemm/panel.h"

namespace torchkiln::gemm::wgmma {

inline constexpr int kRows = 64;
inline constexpr int kColumns = 256;
inline constexpr int kDepth = 16;

/// Sums per thread. Thread t of warp w has sums 4 c to 4 c + 3 in columns 8 c + 2 (t % 4) + {0, 1}:
/// the first two in row 16 w + t / 4, the other two 8 rows below.
inline constexpr int kSums = kRows * kColumns / 128;

/// The descriptor of an operand in a panel of swizzled rows of 128 bytes. It holds the distances
/// between blocks of 8 rows by 128 bytes, in units of 16 bytes:
///
///   Major::k      a panel row is a row of the operand, 64 elements of k. Eight rows further:
///                 1024 bytes. Sixteen elements of k further: 32 bytes, inside the row.
///   Major::outer  a panel row is one element of k, 64 elements of the outer dimension. Eight of k
///                 further: 1024 bytes, sixteen: 2048. The next 64 columns: `panel_bytes` further.
template <Major kMajor>
__device__ __forceinline__ uint64_t descriptor(const void* panel, uint32_t panel_bytes) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(panel));
  const uint64_t across = kMajor == Major::k ? 1 : panel_bytes >> 4;
  const uint64_t eight = (8 * kSwizzleBytes) >> 4;
  return kSwizzle128 | eight << 32 | across << 16 | ((address & 0x3ffff) >> 4);
}

/// Distance from one step of kDepth elements of k to the next, in the units of a descriptor.
template <Major kMajor>
inline constexpr uint64_t kNextStep =
    (kMajor == Major::k ? kDepth * 2 : kDepth * kSwizzleBytes) >> 4;

/// Orders the following products after earlier accesses to the sums. Call it before the first
/// product of a batch.
__device__ __forceinline__ void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

/// Closes a batch of products.
__device__ __forceinline__ void commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/// Waits for all but the last kLeft batches.
template <int kLeft>
__device__ __forceinline__ void wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

/// Waits for all products; the compiler must not move reads of the sums before this call.
__device__ __forceinline__ void wait_all(float (&sums)[kSums]) {
  wait<0>();
#pragma unroll
  for (int i = 0; i < kSums; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

/// Computes sums = A B, plus the old sums if `add`.
template <class T, Major kMajorA, Major kMajorB>
__device__ __forceinline__ void multiply(float (&sums)[kSums], uint64_t a, uint64_t b, bool add) {
  // A macro, because the instruction lists all 128 registers and its name contains the type.
#define EIGHT(i)                                                                             \
  "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3]), "+f"(sums[i + 4]), \
      "+f"(sums[i + 5]), "+f"(sums[i + 6]), "+f"(sums[i + 7])
#define MULTIPLY(type)                                                                            \
  asm volatile(                                                                                   \
      "{.reg .pred add;\n"                                                                        \
      "setp.ne.b32 add, %130, 0;\n"                                                               \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type                                \
      " {"                                                                                        \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                    \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "          \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "          \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "          \
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "          \
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "          \
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, "          \
      "%110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, "            \
      "%123, %124, %125, %126, %127}, %128, %129, add, 1, 1, %131, %132;}"                        \
      : EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24), EIGHT(32), EIGHT(40), EIGHT(48), EIGHT(56),     \
        EIGHT(64), EIGHT(72), EIGHT(80), EIGHT(88), EIGHT(96), EIGHT(104), EIGHT(112), EIGHT(120) \
      : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kMajorA == Major::outer),                 \
        "n"(kMajorB == Major::outer))
  if constexpr (std::is_same_v<T, __half>) {
    MULTIPLY("f16");
  } else {
    MULTIPLY("bf16");
  }
#undef MULTIPLY
#undef EIGHT
}

/// Sets the registers per thread of the calling warpgroup. A warpgroup that only copies releases
/// registers for the warpgroups that multiply.
template <int kRegisters>
__device__ __forceinline__ void decrease_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void increase_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

/// Stores four blocks of 8 by 8 half-precision elements, distributed over the lanes like the sums.
/// Lane l passes the address of row l % 8 of block l / 8, or of column l % 8 if kTransposed.
template <bool kTransposed = false>
__device__ __forceinline__ void store_blocks(void* row, const uint32_t (&blocks)[4]) {
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  if constexpr (kTransposed) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                 "r"(blocks[0]), "r"(blocks[1]), "r"(blocks[2]), "r"(blocks[3])
                 : "memory");
  } else {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                 "r"(blocks[0]), "r"(blocks[1]), "r"(blocks[2]), "r"(blocks[3])
                 : "memory");
  }
}

}  // namespace torchkiln::gemm::wgmma
