#pragma once

// qkv_norm_rope with one norm over all heads of the queries, and one over all heads of the keys: a
// block processes a token. Its threads read the token twice, the second time from the L1 cache.
// Blocks are small: while one waits for its sums, other blocks of the SM read.

#include "ops/rope/qkv.cuh"
#include "torchkiln/device/block_reduce.cuh"

namespace torchkiln::cuda {

Status qkv_norm_across_rope(const QkvNormRope& arguments, CUstream_st* stream);
Status qkv_norm_across_rope_backward(const QkvNormRopeBackward& arguments, Allocate allocate,
                                     CUstream_st* stream);

/// A piece of a packed row.
struct RowPiece {
  int64_t packed;  // the position of the head in the row
  int64_t head;    // of its kind
  int kind;
  Piece piece;

  __device__ __forceinline__ RowPiece(const QkvAcrossPlan& across, uint32_t index, int lanes)
      : RowPiece(across, index, across.pieces.quotient(index), lanes) {}

  /// The index of the head's first element in a packed row, or in the weights of queries and keys
  /// put in a row.
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
