// Products in ordinary arithmetic, for every dtype and layout: float32, which tensor cores would
// round to TF32, float64, and half precision before compute capability 8.0.

#include "detail/gemm/tiles.cuh"
#include "detail/gemm/variants.h"

namespace torchkiln::gemm::simt {
namespace {

template <class C>
constexpr int kTileSide = tile_side(sizeof(C));
template <class C>
constexpr int kSumsOf = sums_of(sizeof(C));

/// The tile of an operand, copied from global to shared memory through registers: the loads of the
/// next tile are in flight while the current tile is multiplied.
template <class T>
class Operand {
 public:
  using C = Compute<T>;
  static constexpr int kSide = kTileSide<C>;
  static constexpr int kItems = kSide * kTileDepth / kThreads;
  using Panel = C[kTileDepth][kSide + kPadding];
  static_assert(sizeof(Panel) == panel_bytes(sizeof(C)));

  /// Adjacent threads read adjacent elements, along k or the other dimension, whichever is
  /// contiguous.
  __device__ __forceinline__ Operand(const void* data, int64_t outer, int64_t depth,
                                     int64_t outer_stride, int64_t depth_stride, int64_t first)
      : data_(static_cast<const T*>(data)),
        outer_(outer),
        depth_(depth),
        outer_stride_(outer_stride),
        depth_stride_(depth_stride),
        first_(first),
        along_depth_(depth_stride == 1) {}

  __device__ __forceinline__ void load(int64_t depth) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int64_t outer = first_ + own_outer(i);
      const int64_t k = depth + own_depth(i);
      loaded_[i] = outer < outer_ && k < depth_
                       ? convert<C>(data_[outer * outer_stride_ + k * depth_stride_])
                       : C(0);
    }
  }
  __device__ __forceinline__ void store(Panel& panel) const {
#pragma unroll
    for (int i = 0; i < kItems; ++i) panel[own_depth(i)][own_outer(i)] = loaded_[i];
  }

 private:
  __device__ __forceinline__ int own_depth(int i) const {
    const int item = i * kThreads + static_cast<int>(threadIdx.x);
    return along_depth_ ? item % kTileDepth : item / kSide;
  }
  __device__ __forceinline__ int own_outer(int i) const {
    const int item = i * kThreads + static_cast<int>(threadIdx.x);
    return along_depth_ ? item / kTileDepth : item % kSide;
  }

  const T* data_;
  int64_t outer_;
  int64_t depth_;
  int64_t outer_stride_;
  int64_t depth_stride_;
  int64_t first_;
  bool along_depth_;
  C loaded_[kItems];
};

template <class T>
using SquareTiles = Tiles<kTileSide<Compute<T>>, kTileSide<Compute<T>>>;

/// The index of row or column i of a thread. In each part of the tile, thread (x, y) has the four
/// rows from 4 y on and the four columns from 4 x on, so a warp reads adjacent or equal vectors
/// from shared memory.
__device__ __forceinline__ int own_index(int thread, int i) {
  constexpr int kRun = 4;
  return i / kRun * (kRun * kGridSide) + thread * kRun + i % kRun;
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    matmul_kernel(Matmul p, SquareTiles<T> tiles, MatmulResults<T> results) {
  wait_for_previous_kernel();
  using C = Compute<T>;
  constexpr int kSums = kSumsOf<C>;
  __shared__ typename Operand<T>::Panel tiles_a[2];
  __shared__ typename Operand<T>::Panel tiles_b[2];
  const auto tile = tiles.at(blockIdx.x);
  Operand<T> a(static_cast<const T*>(p.a.data) + tile.batch * p.a.batch_stride, p.m, p.k,
               p.a.row_stride, p.a.column_stride, tile.row);
  Operand<T> b(static_cast<const T*>(p.b.data) + tile.batch * p.b.batch_stride, p.n, p.k,
               p.b.column_stride, p.b.row_stride, tile.column);
  const int x = static_cast<int>(threadIdx.x) % kGridSide;
  const int y = static_cast<int>(threadIdx.x) / kGridSide;
  C sums[kSums][kSums] = {};
  a.load(0);
  b.load(0);
  int buffer = 0;
  for (int64_t depth = 0; depth < p.k; depth += kTileDepth, buffer ^= 1) {
    // With two buffers per operand, one barrier per step is enough.
    a.store(tiles_a[buffer]);
    b.store(tiles_b[buffer]);
    __syncthreads();
    a.load(depth + kTileDepth);
    b.load(depth + kTileDepth);
#pragma unroll
    for (int k = 0; k < kTileDepth; ++k) {
      C from_a[kSums], from_b[kSums];
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        from_a[i] = tiles_a[buffer][k][own_index(y, i)];
        from_b[i] = tiles_b[buffer][k][own_index(x, i)];
      }
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
#pragma unroll
        for (int j = 0; j < kSums; ++j) sums[i][j] += from_a[i] * from_b[j];
      }
    }
  }
  results.store(tile.batch, [&](const auto& body) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
#pragma unroll
      for (int j = 0; j < kSums; ++j)
        body(tile.row + own_index(y, i), tile.column + own_index(x, j), sums[i][j]);
    }
  });
}

}  // namespace

Status matmul(const Matmul& p, cudaStream_t stream) {
  return dispatch_floating(p.dtype, [&](auto tag) -> Status {
    using T = typename decltype(tag)::type;
    const SquareTiles<T> tiles(p);
    if (tiles.count > kMaxGridX) return {"more tiles than a grid has blocks"};
    const Grid grid{dim3(static_cast<unsigned>(blocks_of(p).count)), dim3(kThreads)};
    return launch_overlapped(matmul_kernel<T>, grid, stream, p, tiles, MatmulResults<T>(p));
  });
}

}  // namespace torchkiln::gemm::simt
