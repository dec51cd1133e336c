// Products in ordinary arithmetic, for every dtype and every layout: float32 without the short
// mantissa of the tensor cores, float64, and half precision before compute capability 8.0.

#include "detail/gemm/tiles.cuh"
#include "detail/gemm/variants.h"

namespace torchkiln::gemm::simt {
namespace {

constexpr int kThreads = 256;
constexpr int kGridSide = 16;  // threads along a side of the tile
constexpr int kTileDepth = 8;

/// A thread has kEach by kEach sums. float64 has half as many: they take twice the registers.
template <class C>
constexpr int kEach = sizeof(C) == 8 ? 4 : 8;
template <class C>
constexpr int kTileSide = kEach<C> * kGridSide;

/// The way of an operand's tile from memory to shared memory, through registers: the next tile is
/// on its way while this one is multiplied.
template <class T>
class Operand {
 public:
  using C = Compute<T>;
  static constexpr int kSide = kTileSide<C>;
  static constexpr int kItems = kSide * kTileDepth / kThreads;
  static constexpr int kPitch = kSide + 4;  // neighbours in k lie in different banks
  using Tile = C[kTileDepth][kPitch];

  /// Neighbouring threads read neighbouring elements, whichever dimension is adjacent.
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
      held_[i] = outer < outer_ && k < depth_
                     ? convert<C>(data_[outer * outer_stride_ + k * depth_stride_])
                     : C(0);
    }
  }
  __device__ __forceinline__ void put(Tile& tile) const {
#pragma unroll
    for (int i = 0; i < kItems; ++i) tile[own_depth(i)][own_outer(i)] = held_[i];
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
  C held_[kItems];
};

template <class T>
using SquareTiles = Tiles<kTileSide<Compute<T>>, kTileSide<Compute<T>>>;

/// Thread (x, y) has the rows 4 y and the columns 4 x of each quarter of the tile: a warp's reads
/// of shared memory are vectors, next to each other or the same.
__device__ __forceinline__ int own(int thread, int i) {
  constexpr int kRun = 4;
  return i / kRun * (kRun * kGridSide) + thread * kRun + i % kRun;
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    matmul_kernel(Matmul p, SquareTiles<T> tiles, MatmulResults<T> results) {
  wait_for_previous_kernel();
  using C = Compute<T>;
  constexpr int kSums = kEach<C>;
  __shared__ typename Operand<T>::Tile tiles_a[2];
  __shared__ typename Operand<T>::Tile tiles_b[2];
  const auto place = tiles.at(blockIdx.x);
  Operand<T> a(static_cast<const T*>(p.a.data) + place.batch * p.a.batch_stride, p.m, p.k,
               p.a.row_stride, p.a.column_stride, place.row);
  Operand<T> b(static_cast<const T*>(p.b.data) + place.batch * p.b.batch_stride, p.n, p.k,
               p.b.column_stride, p.b.row_stride, place.column);
  const int x = static_cast<int>(threadIdx.x) % kGridSide;
  const int y = static_cast<int>(threadIdx.x) / kGridSide;
  C sums[kSums][kSums] = {};
  a.load(0);
  b.load(0);
  int turn = 0;
  for (int64_t depth = 0; depth < p.k; depth += kTileDepth, turn ^= 1) {
    // With two tiles of each, one barrier a round is enough.
    a.put(tiles_a[turn]);
    b.put(tiles_b[turn]);
    __syncthreads();
    a.load(depth + kTileDepth);
    b.load(depth + kTileDepth);
#pragma unroll
    for (int k = 0; k < kTileDepth; ++k) {
      C from_a[kSums], from_b[kSums];
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        from_a[i] = tiles_a[turn][k][own(y, i)];
        from_b[i] = tiles_b[turn][k][own(x, i)];
      }
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
#pragma unroll
        for (int j = 0; j < kSums; ++j) sums[i][j] += from_a[i] * from_b[j];
      }
    }
  }
  results.store(place.batch, [&](const auto& body) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
#pragma unroll
      for (int j = 0; j < kSums; ++j)
        body(place.row + own(y, i), place.column + own(x, j), sums[i][j]);
    }
  });
}

}  // namespace

Status matmul(const Matmul& p, cudaStream_t stream) {
  return dispatch_floating(p.dtype, [&](auto tag) -> Status {
    using T = typename decltype(tag)::type;
    const SquareTiles<T> tiles(p);
    if (tiles.count > kMaxGridX) return {"more tiles than a grid has blocks"};
    const Grid grid{dim3(static_cast<unsigned>(tiles.count)), dim3(kThreads)};
    return launch_overlapped(matmul_kernel<T>, grid, stream, p, tiles, MatmulResults<T>(p));
  });
}

}  // namespace torchkiln::gemm::simt
