#pragma once

// The tensor cores as a warp uses them: 16 x 16 of A times 16 x 8 of B.
//
// Thread t of a warp has, of each block of 8 x 8 elements, two neighbours of row t / 4, from column
// 2 (t % 4) on. A consists of four such blocks, B of two, the sums of two.

#include <torchkiln/device/vec.cuh>

// Loads four blocks. Lane l gives the address of row l % 8 of block l / 8.
__device__ __forceinline__ void load_blocks(uint32_t (&blocks)[4], const void* row) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(blocks[0]), "=r"(blocks[1]), "=r"(blocks[2]), "=r"(blocks[3])
               : "r"(address)
               : "memory");
}

// sums += A B
__device__ __forceinline__ void multiply(float (&sums)[4], const uint32_t (&a)[4], uint32_t b_first,
                                         uint32_t b_second) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7},"
      " {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_first), "r"(b_second));
}

// The 64 x 32 results of a warp, from tiles in shared memory whose rows have kPitch elements.
template <int kPitch>
struct WarpTile {
  int row;  // in the block's tile
  int column;
  float sums[4][4][4];

  __device__ __forceinline__ WarpTile(int warp)
      : row(warp % 2 * 64), column(warp / 2 * 32), sums{} {}

  // Adds the products of 16 elements of k.
  __device__ __forceinline__ void add(const __nv_bfloat16 (*a)[kPitch],
                                      const __nv_bfloat16 (*b)[kPitch], int depth) {
    const int lane = threadIdx.x % 32;
    uint32_t from_a[4][4], from_b[2][4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      load_blocks(from_a[i], &a[row + i * 16 + lane % 16][depth + lane / 16 * 8]);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int at = column + j * 16 + lane / 16 * 8 + lane % 8;
      load_blocks(from_b[j], &b[at][depth + lane / 8 % 2 * 8]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        multiply(sums[i][j], from_a[i], from_b[j / 2][j % 2 * 2], from_b[j / 2][j % 2 * 2 + 1]);
    }
  }

  // Writes the results; `to` is the first element of the block's tile in a matrix of n columns.
  __device__ __forceinline__ void store(__nv_bfloat16* to, int n) const {
    const int lane = threadIdx.x % 32;
    to += int64_t{row + lane / 4} * n + column + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float (&four)[4] = sums[i][j];
        const float upper[2] = {four[0], four[1]}, lower[2] = {four[2], four[3]};
        torchkiln::device::store<2>(to + int64_t{i * 16} * n + j * 8, upper);
        torchkiln::device::store<2>(to + int64_t{i * 16 + 8} * n + j * 8, lower);
      }
    }
  }
};
