#pragma once

// qkv_norm_rope with one norm over all heads of the queries, and one over those of the keys: a
// block processes a token. Its threads read the token twice, the second time from the L1 cache.
// Blocks are small: while one waits for its sums, others of the SM read.

#include <algorithm>

#include "ops/rope/qkv.cuh"
#include "torchkiln/device/block_reduce.cuh"

namespace torchkiln::cuda {

Status qkv_norm_across_rope(const QkvNormRope& arguments, CUstream_st* stream);
Status qkv_norm_across_rope_backward(const QkvNormRopeBackward& arguments, Allocate allocate,
                                     CUstream_st* stream);

struct QkvAcrossPlan {
  QkvPlan plan;
  Divisor pieces;       // per head
  uint32_t normalized;  // pieces of queries and keys, which come first
  uint32_t all;
  int64_t sizes[2];  // of the norms
};

/// A piece of a packed row.
struct RowPiece {
  int64_t packed;  // the position of the head in the row
  int64_t head;    // of its kind
  int kind;
  Piece piece;

  __device__ __forceinline__ RowPiece(const QkvAcrossPlan& across, uint32_t index, int lanes)
      : RowPiece(across, index, across.pieces.quotient(index), lanes) {}

  /// The element of a packed row, or of the weights of queries and keys in a row, at which the
  /// head begins.
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

/// Loads and widens a piece of a head; a second vector that does not exist is zeros.
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

template <int kLanes>
QkvAcrossPlan make_across_plan(const QkvNormRope& p) {
  QkvAcrossPlan across{};
  across.plan = make_qkv_plan<kLanes, 1>(p);
  across.pieces = Divisor(across.plan.pieces);
  across.normalized = static_cast<uint32_t>(p.heads + p.kv_heads) * across.plan.pieces;
  across.all = static_cast<uint32_t>(p.heads + 2 * p.kv_heads) * across.plan.pieces;
  for (int kind = 0; kind < 2; ++kind) across.sizes[kind] = p.norm_size(kind);
  return across;
}

/// Threads of a block, whole warps, with about `pieces` pieces of a token each.
inline int across_threads(const QkvAcrossPlan& across, int pieces) {
  const auto rounds = [&](int64_t threads) { return ceil_div(across.all, threads); };
  const int64_t least = std::max<int64_t>(ceil_div(across.all, pieces), 2 * kWarpLanes);
  const int64_t even = ceil_div(across.all, rounds(std::min<int64_t>(least, kQkvThreads)));
  return static_cast<int>(ceil_div(even, kWarpLanes)) * kWarpLanes;
}

}  // namespace torchkiln::cuda
