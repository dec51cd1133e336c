// Products of half precision on the tensor cores, by warps: for compute capability 8.0 and later,
// and for operands of any alignment and any strides.
//
// A block computes a tile of 128 by 128 results. Its eight warps form a grid of two by four, and
// each has 64 by 32 sums in registers. Panels of A and B, 32 deep, go through a ring of three
// stages, copied two stages ahead. A panel has the same order in shared memory as its operand has
// in memory:
//
//   k adjacent      [128][32], each row is a row of A or a column of B
//   outer adjacent  [32][128], each row is one element of k; read transposed
//
// Rows are padded by 16 bytes, so that the eight rows that are read together begin in different
// banks.

#include <cuda_pipeline.h>

#include "detail/gemm/tiles.cuh"
#include "detail/gemm/variants.h"

namespace torchkiln::gemm::tensor_core {
namespace {

// Unused below compute capability 8.0, which does not have these instructions.
[[maybe_unused]] constexpr int kWarpRows = 64;
[[maybe_unused]] constexpr int kWarpColumns = 32;
// One instruction multiplies 16 by 16 of A with 16 by 8 of B.
[[maybe_unused]] constexpr int kStepRows = 16;
[[maybe_unused]] constexpr int kStepColumns = 8;
[[maybe_unused]] constexpr int kStepDepth = 16;

/// An operand, and the place in it where this block's panels begin.
template <class T>
struct Source {
  const T* data;
  int64_t outer;  // first row of A, or first column of B
  int64_t depth;
  int64_t outer_stride;
  int64_t depth_stride;
};

template <class T, Order kOrder>
struct Panel {
  static constexpr int kChunk = kVectorLanes<T>;
  static constexpr bool kOuterAdjacent = kOrder == Order::outer_adjacent;
  static constexpr int kRows = kOuterAdjacent ? kDepth : kSide;
  static constexpr int kColumns = kOuterAdjacent ? kSide : kDepth;

  alignas(16) T at[kRows][kColumns + kChunk];

  /// Starts to copy a panel, whose k begins at `depth`. Elements outside the operand become zero.
  __device__ __forceinline__ void fetch(const Source<T>& from, int64_t depth) {
    constexpr int kChunksOfRow = kColumns / kChunk;
    constexpr int kItems = kRows * kChunksOfRow / kThreads;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int item = i * kThreads + static_cast<int>(threadIdx.x);
      const int row = item / kChunksOfRow;
      const int column = item % kChunksOfRow * kChunk;
      T* to = &at[row][column];
      const int64_t outer = kOuterAdjacent ? column : row;
      const int64_t k = depth + (kOuterAdjacent ? row : column);
      const T* source = from.data + outer * from.outer_stride + k * from.depth_stride;
      if constexpr (kOrder == Order::strided) {
        Vec<T, kChunk> chunk;
#pragma unroll
        for (int lane = 0; lane < kChunk; ++lane) {
          const bool is_there = outer < from.outer && k + lane < from.depth;
          chunk.lane[lane] = is_there ? source[lane * from.depth_stride] : convert<T>(0.0f);
        }
        *reinterpret_cast<Vec<T, kChunk>*>(to) = chunk;
      } else {
        const int64_t left = kOuterAdjacent ? (k < from.depth ? from.outer - outer : 0)
                                            : (outer < from.outer ? from.depth - k : 0);
        const int missing = kChunk - static_cast<int>(max(int64_t{0}, min(left, int64_t{kChunk})));
        __pipeline_memcpy_async(to, missing == kChunk ? from.data : source, kVectorBytes,
                                missing * sizeof(T));
      }
    }
  }
};

/// Loads four blocks of 8 by 8 elements. Lane l passes the address of row l % 8 of block l / 8.
/// Thread t gets elements 2 (t % 4) and 2 (t % 4) + 1 of row t / 4 or, if transposed, of column t /
/// 4.
template <bool kTransposed>
__device__ __forceinline__ void load_blocks(uint32_t (&blocks)[4], const void* row) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(blocks[0]), "=r"(blocks[1]), "=r"(blocks[2]), "=r"(blocks[3])
                 : "r"(address));
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(blocks[0]), "=r"(blocks[1]), "=r"(blocks[2]), "=r"(blocks[3])
                 : "r"(address));
  }
}

/// Loads the blocks at (outer, k), (outer + 8, k), (outer, k + 8) and (outer + 8, k + 8);
/// kDepthFirst exchanges the second and the third.
template <bool kDepthFirst, class T, Order kOrder>
__device__ __forceinline__ void load_step(uint32_t (&blocks)[4], const Panel<T, kOrder>& panel,
                                          int outer, int k) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int odd = lane / 8 % 2 * 8;
  const int high = lane / 16 * 8;
  const int own_outer = outer + (kDepthFirst ? high : odd);
  const int own_k = k + (kDepthFirst ? odd : high);
  if constexpr (Panel<T, kOrder>::kOuterAdjacent) {
    load_blocks<true>(blocks, &panel.at[own_k + lane % 8][own_outer]);
  } else {
    load_blocks<false>(blocks, &panel.at[own_outer + lane % 8][own_k]);
  }
}

/// sums += A B. Thread t has columns 2 (t % 4) and 2 (t % 4) + 1, in row t / 4 for the first two
/// sums and in row t / 4 + 8 for the other two.
template <class T>
__device__ __forceinline__ void multiply(float (&sums)[4], const uint32_t (&a)[4], uint32_t b_low,
                                         uint32_t b_high) {
#define MULTIPLY(type)                                                                \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                 \
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])           \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_low), "r"(b_high))
  if constexpr (std::is_same_v<T, __half>) {
    MULTIPLY("f16");
  } else {
    MULTIPLY("bf16");
  }
#undef MULTIPLY
}

template <class T, Order kOrderA, Order kOrderB>
struct Stage {
  Panel<T, kOrderA> a;
  Panel<T, kOrderB> b;
};

template <class T, Order kOrderA, Order kOrderB>
__global__ void __launch_bounds__(kThreads)
    matmul_kernel(Matmul p, Tiles<kSide, kSide> tiles, MatmulResults<T> results) {
  wait_for_previous_kernel();
#if __CUDA_ARCH__ >= 800
  extern __shared__ __align__(16) unsigned char memory[];
  auto* const stages = reinterpret_cast<Stage<T, kOrderA, kOrderB>*>(memory);
  const auto tile = tiles.at(blockIdx.x);
  const auto source = [&](const Matrices& from, int64_t first, int64_t outer, int64_t outer_stride,
                          int64_t depth_stride) {
    const T* data =
        static_cast<const T*>(from.data) + tile.batch * from.batch_stride + first * outer_stride;
    return Source<T>{data, outer - first, p.k, outer_stride, depth_stride};
  };
  const Source<T> a = source(p.a, tile.row, p.m, p.a.row_stride, p.a.column_stride);
  const Source<T> b = source(p.b, tile.column, p.n, p.b.column_stride, p.b.row_stride);
  const auto fetch = [&](int64_t step, int stage) {
    if (step * kDepth < p.k) {
      stages[stage].a.fetch(a, step * kDepth);
      stages[stage].b.fetch(b, step * kDepth);
    }
    __pipeline_commit();
  };

  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const int warp_row = warp % 2 * kWarpRows;
  const int warp_column = warp / 2 * kWarpColumns;
  constexpr int kRowSteps = kWarpRows / kStepRows;
  constexpr int kColumnSteps = kWarpColumns / kStepColumns;
  float sums[kRowSteps][kColumnSteps][4] = {};
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) fetch(stage, stage);
  int stage = 0;
  for (int64_t step = 0; step * kDepth < p.k; ++step) {
    __pipeline_wait_prior(kStages - 2);
    __syncthreads();  // this stage has arrived, and the one before has been read
    fetch(step + kStages - 1, stage == 0 ? kStages - 1 : stage - 1);
    const auto& panels = stages[stage];
    stage = stage + 1 == kStages ? 0 : stage + 1;
#pragma unroll
    for (int k = 0; k < kDepth; k += kStepDepth) {
      uint32_t from_a[kRowSteps][4];
      uint32_t from_b[kColumnSteps / 2][4];
#pragma unroll
      for (int i = 0; i < kRowSteps; ++i)
        load_step<false>(from_a[i], panels.a, warp_row + i * kStepRows, k);
#pragma unroll
      for (int j = 0; j < kColumnSteps / 2; ++j)
        load_step<true>(from_b[j], panels.b, warp_column + j * 2 * kStepColumns, k);
#pragma unroll
      for (int i = 0; i < kRowSteps; ++i) {
#pragma unroll
        for (int j = 0; j < kColumnSteps; ++j)
          multiply<T>(sums[i][j], from_a[i], from_b[j / 2][j % 2 * 2],
                      from_b[j / 2][j % 2 * 2 + 1]);
      }
    }
  }
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int64_t row = tile.row + warp_row + lane / 4;
  const int64_t column = tile.column + warp_column + lane % 4 * 2;
  results.store(tile.batch, [&](const auto& body) {
#pragma unroll
    for (int i = 0; i < kRowSteps; ++i) {
#pragma unroll
      for (int j = 0; j < kColumnSteps; ++j) {
#pragma unroll
        for (int s = 0; s < 4; ++s)
          body(row + i * kStepRows + s / 2 * 8, column + j * kStepColumns + s % 2, sums[i][j][s]);
      }
    }
  });
#endif
}

template <class T, Order kOrderA, Order kOrderB>
Status launch(const Matmul& p, cudaStream_t stream) {
  static_assert(sizeof(Stage<T, kOrderA, kOrderB>) == panel_bytes(kOrderA) + panel_bytes(kOrderB));
  const Tiles<kSide, kSide> tiles(p);
  if (tiles.count > kMaxGridX) return {"more tiles than a grid has blocks"};
  const Blocks blocks = blocks_of(p, {kOrderA, kOrderB});
  const Grid grid{dim3(static_cast<unsigned>(blocks.count)), dim3(kThreads), 1,
                  blocks.shared_bytes};
  return launch_overlapped(matmul_kernel<T, kOrderA, kOrderB>, grid, stream, p, tiles,
                           MatmulResults<T>(p));
}

template <class T>
Status matmul_of(const Matmul& p, cudaStream_t stream) {
  const auto [a, b] = orders_of(p);
  if (a == Order::strided) return launch<T, Order::strided, Order::strided>(p, stream);
  if (a == Order::k_adjacent) {
    return b == Order::k_adjacent ? launch<T, Order::k_adjacent, Order::k_adjacent>(p, stream)
                                  : launch<T, Order::k_adjacent, Order::outer_adjacent>(p, stream);
  }
  return b == Order::k_adjacent
             ? launch<T, Order::outer_adjacent, Order::k_adjacent>(p, stream)
             : launch<T, Order::outer_adjacent, Order::outer_adjacent>(p, stream);
}

}  // namespace

Status matmul(const Matmul& p, cudaStream_t stream) {
  if (p.dtype == Dtype::float16) return matmul_of<__half>(p, stream);
  return matmul_of<__nv_bfloat16>(p, stream);
}

}  // namespace torchkiln::gemm::tensor_core
