#pragma once

// The operands that the kernels of matrix products support, and the blocks that compute the tiles
// of a result. Includes no header of CUDA.
//
//   sm90          128 by 256 results   persistent blocks, at most one per SM
//   tensor_core   128 by 128           a block per tile
//   simt          128 by 128           a block per tile; 64 by 64 in float64

#include <algorithm>

#include "detail/gemm/operands.h"

namespace torchkiln::gemm {

/// The blocks of a product.
struct Blocks {
  int64_t count;
  int threads;
  int shared_bytes;  // dynamic shared memory per block
};

inline int64_t count_tiles(const Matmul& p, int64_t rows, int64_t columns) {
  return ceil_div(p.m, rows) * ceil_div(p.n, columns) * p.batch;
}

namespace sm90 {

inline constexpr int kTileRows = 128;
inline constexpr int kTileColumns = 256;
inline constexpr int kTileDepth = 64;
inline constexpr int kStages = 3;
inline constexpr int kWarpgroup = 4 * kWarpLanes;
inline constexpr int kMultipliers = 2;  // warpgroups
inline constexpr int kThreads = (1 + kMultipliers) * kWarpgroup;

// A panel is 128 rows of A or columns of B, 64 deep. It takes one copy (box) or, if k is not
// contiguous, two.
inline constexpr int kPanelWidth = 128;
inline constexpr int kPanel = kPanelWidth * kTileDepth;
inline constexpr int kPanelsOfB = kTileColumns / kPanelWidth;
inline constexpr int kStageBytes = (1 + kPanelsOfB) * kPanel * 2;

/// Shared memory of a block: the stages, the results of a tile, and `others` bytes, rounded up to a
/// multiple of 1024 bytes, the alignment of the swizzle.
constexpr int shared_bytes(int others) {
  constexpr int kAligned = 1024;
  constexpr int kResults = kTileRows * kTileColumns * 2;
  constexpr int kBarriers = 2 * kStages * 8;
  return (kStages * kStageBytes + kResults + kBarriers + others + kAligned - 1) / kAligned *
         kAligned;
}

/// Shared memory of a product. Besides stages and results: two bias vectors per multiplier, and the
/// barriers of its sums.
inline constexpr int kSharedBytes = shared_bytes(kMultipliers * (2 * kTileColumns * 4 + 2 * 8));
/// Shared memory of a convolution, which has no bias and no barriers of sums.
inline constexpr int kPixelSharedBytes = shared_bytes(0);

inline Blocks blocks_of(const Matmul& p, int multiprocessors) {
  const int64_t tiles = count_tiles(p, kTileRows, kTileColumns);
  return {std::min<int64_t>(tiles, multiprocessors), kThreads, kSharedBytes};
}

/// Whether TMA can read the operands and write the results in place.
inline bool fits(const Matmul& p) {
  return fits_copies(p) && fits_tensor_map(describe_result(p, p.out), p.dtype) &&
         (p.preactivation == nullptr ||
          fits_tensor_map(describe_result(p, p.preactivation), p.dtype)) &&
         aligned(p.residual);
}

inline bool is_plain(const Matmul& p) {
  return p.batch == 1 && p.scale == 1 && p.residual == nullptr;
}

/// Whether TMA can read the operands in place, for a product with a gate in the epilogue. A tile
/// has one panel of gate and one of up.
inline bool fits_gate(const Matmul& p) {
  return is_plain(p) && fits_copies(p) && describe_a(p).major == Major::k &&
         describe_b(p).major == Major::k && p.n % (2 * kPanelWidth) == 0 && aligned(p.out) &&
         aligned(p.preactivation);
}
inline bool fits_gate(const GateGradient& p) {
  const Matmul& product = p.product;
  return is_plain(product) && fits_copies(product) && describe_a(product).major == Major::k &&
         describe_b(product).major == Major::outer &&
         product.n % vector_lanes(product.dtype) == 0 && aligned(product.out) &&
         aligned(p.gate_up) && aligned(p.grad_gate_up);
}

}  // namespace sm90

namespace tensor_core {

inline constexpr int kThreads = 256;
inline constexpr int kSide = 128;
inline constexpr int kDepth = 32;
inline constexpr int kStages = 3;
inline constexpr int kLanes = 8;  // per 16-byte vector

/// Memory order of an operand. The elements of a strided operand are loaded one by one; in shared
/// memory k is adjacent.
enum class Order { k_adjacent, outer_adjacent, strided };

/// The memory order of an operand. The stride of a dimension of size 1 is arbitrary.
inline Order order_of(const Matrices& from, int64_t outer, int64_t depth, int64_t outer_stride,
                      int64_t depth_stride) {
  const auto in_vectors = [&](int64_t size, int64_t stride) {
    return rows_in_vectors(from.data, kLanes, {from.batch_stride, size == 1 ? 0 : stride});
  };
  if ((depth_stride == 1 || depth == 1) && in_vectors(outer, outer_stride))
    return Order::k_adjacent;
  if ((outer_stride == 1 || outer == 1) && in_vectors(depth, depth_stride))
    return Order::outer_adjacent;
  return Order::strided;
}

/// The orders of A and B. If one is strided, both are, which saves instantiations.
struct Orders {
  Order a;
  Order b;
};

inline Orders orders_of(const Matmul& p) {
  const Order a = order_of(p.a, p.m, p.k, p.a.row_stride, p.a.column_stride);
  const Order b = order_of(p.b, p.n, p.k, p.b.column_stride, p.b.row_stride);
  if (a == Order::strided || b == Order::strided) return {Order::strided, Order::strided};
  return {a, b};
}

/// Bytes of a panel. Each row is padded by one vector.
constexpr int panel_bytes(Order order) {
  return 2 *
         (order == Order::outer_adjacent ? kDepth * (kSide + kLanes) : kSide * (kDepth + kLanes));
}

inline Blocks blocks_of(const Matmul& p, const Orders& orders) {
  return {count_tiles(p, kSide, kSide), kThreads,
          kStages * (panel_bytes(orders.a) + panel_bytes(orders.b))};
}

}  // namespace tensor_core

namespace simt {

inline constexpr int kThreads = 256;
inline constexpr int kGridSide = 16;  // threads along a side of the tile

/// Sums per thread along each side of the tile. float64 has half as many, because its sums take
/// twice the registers.
constexpr int sums_of(size_t bytes) { return bytes == 8 ? 4 : 8; }
constexpr int tile_side(size_t bytes) { return sums_of(bytes) * kGridSide; }

inline constexpr int kTileDepth = 8;
inline constexpr int kPadding = 4;  // elements, so that adjacent k lie in different banks
/// Bytes of a tile of an operand in shared memory. `bytes`: size of a sum.
constexpr int panel_bytes(size_t bytes) {
  return kTileDepth * (tile_side(bytes) + kPadding) * static_cast<int>(bytes);
}

inline Blocks blocks_of(const Matmul& p) {
  const int side = tile_side(size_of(p.dtype));
  return {count_tiles(p, side, side), kThreads, 0};
}

}  // namespace simt
}  // namespace torchkiln::gemm
