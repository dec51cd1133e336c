#pragma once

// Softmax of rows whose elements are adjacent in y but not in x. A block copies a tile of rows to
// shared memory, so that it reads x once and writes adjacent elements of y.

#include "strided.cuh"
#include "torchkiln/device/fast_divide.cuh"

namespace torchkiln::cuda {
namespace {

template <class T, bool kLog>
__global__ void __launch_bounds__(kMaxTileThreads, 2)
    softmax_tile(Softmax p, TilePlan plan, Divisor length) {
  using C = Compute<T>;
  using Math = MathFor<T>;
  constexpr int kLoads = 8;  // in flight per thread
  extern __shared__ uint4 softmax_memory[];
  __shared__ C exchanged[kMaxTileThreads];
  __shared__ C references[kMaxTileRows], factors[kMaxTileRows];
  T* const tile = reinterpret_cast<T*>(softmax_memory);
  const int thread = static_cast<int>(threadIdx.x);
  // Adjacent threads read along the dimension with the smaller stride: rows, or elements of a row.
  const bool across = p.outer_stride <= p.stride;
  const int row = across ? thread % plan.rows : thread / plan.depth;
  const int place = across ? thread / plan.rows : thread % plan.depth;
  const int64_t first = int64_t{blockIdx.x} * plan.rows;
  const int rows = static_cast<int>(min(int64_t{plan.rows}, p.outer - first));
  const int count = row < rows ? static_cast<int>(p.length) : 0;
  const T* const x = static_cast<const T*>(p.x) + (first + row) * p.outer_stride;
  T* const own = tile + row * plan.pitch;
  const C scale = static_cast<C>(p.scale);
  // Returns the result of its row to every thread.
  const auto reduce = [&](C value, auto op) {
    __syncthreads();
    exchanged[place * plan.rows + row] = value;
    __syncthreads();
    C result = decltype(op)::template identity<C>();
#pragma unroll 8
    for (int k = 0; k < plan.depth; ++k) result = op(result, exchanged[k * plan.rows + row]);
    return result;
  };
  wait_for_previous_kernel();
  C largest = C(kExcluded);
  for (int from = place; from < count; from += kLoads * plan.depth) {
    T items[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k)
      if (from + k * plan.depth < count) items[k] = x[(from + k * plan.depth) * p.stride];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      if (from + k * plan.depth >= count) continue;
      own[from + k * plan.depth] = items[k];
      largest = fmax(largest, convert<C>(items[k]) * scale);
    }
  }
  largest = reduce(largest, Max{});
  C sum = 0;
#pragma unroll 4
  for (int i = place; i < count; i += plan.depth)
    sum += Math::exp(convert<C>(own[i]) * scale - largest);
  sum = reduce(sum, Sum{});
  if (place == 0) {
    references[row] = largest;
    factors[row] = kLog ? log(sum) : C(1) / sum;
  }
  __syncthreads();
  T* const y = static_cast<T*>(p.y) + first * p.length;
  const int elements = rows * static_cast<int>(p.length);
#pragma unroll 4
  for (int at = thread; at < elements; at += static_cast<int>(blockDim.x)) {
    const auto of = static_cast<int>(length.quotient(static_cast<uint32_t>(at)));
    const T item = tile[of * plan.pitch + at - of * static_cast<int>(p.length)];
    const C below = convert<C>(item) * scale - references[of];
    y[at] = convert<T>(kLog ? below - factors[of] : Math::exp(below) * factors[of]);
  }
}

template <class T, bool kLog>
Status launch_tiles(const Softmax& p, const TilePlan& plan, CUstream_st* stream) {
  if (plan.blocks > kMaxGridX) return {"too many rows for one launch"};
  Grid grid{dim3(static_cast<unsigned>(plan.blocks)), dim3(static_cast<unsigned>(plan.threads()))};
  grid.shared_bytes = plan.bytes;
  return launch_overlapped(softmax_tile<T, kLog>, grid, stream, p, plan,
                           Divisor(static_cast<uint32_t>(p.length)));
}

}  // namespace
}  // namespace torchkiln::cuda
