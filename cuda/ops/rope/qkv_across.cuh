#pragma once

// qkv_norm_rope with one norm over all heads of the queries, and one over all heads of the keys. A
// block processes a token. Its threads read the token twice, the second time from the L1 cache.
// Blocks are small, so that while one waits for its sums, other blocks of the SM read. If there are
// few tokens of many heads, several blocks along y share a token in two launches: the first launch
// writes the sums of each block.

#include "ops/rope/qkv.cuh"
#include "torchkiln/device/block_reduce.cuh"

namespace torchkiln::cuda {

Status qkv_norm_across_rope(const QkvNormRope& arguments, Allocate allocate, CUstream_st* stream);
Status qkv_norm_across_rope_backward(const QkvNormRopeBackward& arguments, Allocate allocate,
                                     CUstream_st* stream);

/// A piece of a packed row.
struct RowPiece {
  int64_t packed;  // the position of the head in the row
  int64_t head;    // index among the heads of its kind
  int kind;
  Piece piece;

  __device__ __forceinline__ RowPiece(const QkvAcrossPlan& across, uint32_t index, int lanes)
      : RowPiece(across, index, across.pieces.quotient(index), lanes) {}

  /// The index of the head's first element in a packed row. Also its index in the weights of
  /// queries and keys, seen as one row.
  __device__ __forceinline__ int64_t begin(const QkvNormRope& p) const {
    return packed * p.head_dim;
  }

 private:
  __device__ __forceinline__ RowPiece(const QkvAcrossPlan& across, uint32_t index, uint32_t head,
                                      int lanes)
      : packed(head),
        head(head),
        kind(kQueries),
        piece(across.plan, index - head * across.pieces.divisor(), lanes) {
    const QkvNormRope& p = across.plan.p;
    if (packed < p.heads) return;
    kind = packed < p.heads + p.kv_heads ? 1 : kValues;
    this->head = packed - p.heads - (kind == kValues ? p.kv_heads : 0);
  }
};

/// The first piece of a thread, and the step from piece to piece.
__device__ __forceinline__ uint32_t first_piece() { return blockIdx.y * blockDim.x + threadIdx.x; }
__device__ __forceinline__ uint32_t piece_step() { return gridDim.y * blockDim.x; }

/// The sums of the blocks that share a token. The first launch writes them, the second launch adds
/// them.
template <int N, class C>
struct BlockSums {
  C* sums;        // [token][block][N]; null if there is one launch, with a block per token
  bool is_first;  // first of two launches

  __device__ __forceinline__ bool is_second() const { return sums != nullptr && !is_first; }

  __device__ __forceinline__ C* of(uint32_t block) const {
    return sums + (uint64_t{blockIdx.x} * gridDim.y + block) * N;
  }
  __device__ __forceinline__ void write(const C (&own)[N]) const {
    if (threadIdx.x > 0) return;
#pragma unroll
    for (int i = 0; i < N; ++i) of(blockIdx.y)[i] = own[i];
  }
  /// Adds the sums of the blocks threadIdx.x, threadIdx.x + blockDim.x and so on.
  __device__ __forceinline__ void add_to(C (&own)[N]) const {
    for (uint32_t block = threadIdx.x; block < gridDim.y; block += blockDim.x) {
#pragma unroll
      for (int i = 0; i < N; ++i) own[i] += of(block)[i];
    }
  }
};

/// Calls launch(grid, sums), twice if tokens have several blocks.
template <int N, class C, class Launch>
Status launch_across(const QkvAcrossChoice& choice, Allocate allocate, const Launch& launch) {
  Grid grid{};
  grid.blocks = dim3(static_cast<unsigned>(choice.blocks), static_cast<unsigned>(choice.parts));
  grid.threads = dim3(choice.threads);
  grid.shared_bytes = choice.shared_bytes;
  if (choice.parts == 1) return launch(grid, BlockSums<N, C>{});
  const int64_t count = choice.blocks * choice.parts * N;
  C* const sums = static_cast<C*>(allocate(static_cast<size_t>(count) * sizeof(C)));
  const Status status = launch(grid, BlockSums<N, C>{sums, true});
  return status.ok() ? launch(grid, BlockSums<N, C>{sums, false}) : status;
}

/// Loads and widens a piece of a head; a missing second vector becomes zeros.
template <class T, class C, int kLanes>
__device__ __forceinline__ void load_piece(const T* head, const Piece& piece, C (&a)[kLanes],
                                           C (&b)[kLanes]) {
  widen(load_constant<kLanes>(head + piece.first), a);
  widen(load_constant<kLanes>(head + piece.second), b);
  if (piece.has_second) return;
#pragma unroll
  for (int i = 0; i < kLanes; ++i) b[i] = C(0);
}

/// Rounds and stores a piece of a head.
template <class T, class C, int kLanes>
__device__ __forceinline__ void store_piece(T* head, const Piece& piece, const C (&a)[kLanes],
                                            const C (&b)[kLanes]) {
  store(head + piece.first, a);
  if (piece.has_second) store(head + piece.second, b);
}

}  // namespace torchkiln::cuda
