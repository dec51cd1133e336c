// The dot product of a row of `left` and a row of `right` for each entry of a sparse pattern: the
// gradient of the values of a product. choose.h selects the threads that read a row:
//
//   narrow    eight lanes, with eight entries in flight
//   wide      a warp or more, four vectors of four entries at a time
//   entries   a block, if entries are few and rows wide, or if elements are far apart

#include "choose.h"
#include "detail/sparse/csr_launch.cuh"

namespace torchkiln::cuda {

using namespace device;
using namespace sparse;
namespace {

constexpr int kThreads = kSpmmThreads;

/// Sums part[u] over kLanes lanes; lane u gets the sum of entry u. Each of the first steps halves
/// the number of entries per lane, so that 8 sums over 8 lanes take 7 shuffles instead of 24.
template <int kLanes, class C, int U>
__device__ __forceinline__ C sum_over_lanes(C (&part)[U], int lane) {
#pragma unroll
  for (int n = U / 2; n > 0; n /= 2) {
    const bool is_upper = (lane & n) != 0;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const C kept = is_upper ? part[i + n] : part[i];
      const C other = is_upper ? part[i] : part[i + n];
      part[i] = kept + __shfl_xor_sync(~0u, other, n);
    }
  }
#pragma unroll
  for (int n = U; n < kLanes; n *= 2) part[0] += __shfl_xor_sync(~0u, part[0], n);
  return part[0];
}

template <class Flight, class T, class Index, int V>
__global__ void __launch_bounds__(kThreads, sampled_blocks<Flight>(sizeof(T)))
    sampled_pieces(SampledProduct p, Units units, int64_t blocks_per_matrix) {
  using C = Compute<T>;
  constexpr int U = Flight::kUnroll;
  constexpr int kLanes = Flight::kLanes;
  constexpr int kStep = kLanes * V;
  wait_for_previous_kernel();
  const int64_t batch = blockIdx.x / blocks_per_matrix;
  const int64_t in_matrix = blockIdx.x - batch * blocks_per_matrix;
  const Index* crow = begins_of<Index>(p.pattern, batch);
  const Index* col = columns_of<Index>(p.pattern, batch);
  const int64_t summed = p.summed ? p.batch : 1;
  const int row_stride = static_cast<int>(p.right.row_stride);
  const int lane = threadIdx.x % kLanes;
  const int64_t thread = in_matrix * kThreads + threadIdx.x;

  // Groups of lanes alternate over the entries of a piece, U at a time.
  const auto multiply = [&](const Piece<Index>& piece, int group_log2) {
    const int splits = (1 << group_log2) / kLanes;
    const int split = static_cast<int>(thread / kLanes) & (splits - 1);
    const int64_t row = max(piece.row, 0) * p.left.row_stride;
    // All lanes take part in the shuffles, so each lane continues until all of them are done.
    for (Index e = piece.begin + U * split; __any_sync(~0u, e < piece.end); e += U * splits) {
      int row_index[U];
      C part[U];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        row_index[u] = e + u < piece.end ? static_cast<int>(__ldg(col + e + u)) : -1;
        part[u] = 0;
      }
      for (int64_t k = batch; k < batch + summed; ++k) {
        const T* left = static_cast<const T*>(p.left.data) + k * p.left.batch_stride + row;
        const T* right = static_cast<const T*>(p.right.data) + k * p.right.batch_stride;
        for (int64_t column = lane * V; column < p.width; column += Flight::kSteps * kStep) {
          Vec<T, V> rows[Flight::kSteps][U];
          Vec<T, V> factors[Flight::kSteps];
#pragma unroll
          for (int s = 0; s < Flight::kSteps; ++s) {
            // Steps beyond the end add products of zeros.
            const int64_t place = column + s * kStep;
            const bool inside = s == 0 || place < p.width;
            load_rows<V>(right + place, row_stride, row_index, rows[s], inside);
            factors[s] = inside ? load_part<V>(left + place) : Vec<T, V>{};
          }
#pragma unroll
          for (int s = 0; s < Flight::kSteps; ++s) {
            C x[V];
            widen(factors[s], x);
#pragma unroll
            for (int u = 0; u < U; ++u) {
              C y[V];
              widen(rows[s][u], y);
#pragma unroll
              for (int i = 0; i < V; ++i) part[u] += x[i] * y[i];
            }
          }
        }
      }
      const C total = sum_over_lanes<kLanes>(part, lane);
      if (lane < U && e + lane < piece.end)
        static_cast<T*>(p.out)[batch * p.pattern.entries + e + lane] = convert<T>(total);
    }
  };
  for_each_piece(p.pattern, crow, units, chunk_log2_of<Flight>(units), thread, multiply);
}

/// One block per entry of one matrix, for few entries with very wide rows, or with elements of
/// `right` that are far apart in memory.
template <class T, class Index>
__global__ void __launch_bounds__(kEntryThreads) sampled_entries(SampledProduct p) {
  using C = Compute<T>;
  constexpr int U = 8;
  __shared__ C parts[kEntryThreads / kWarpLanes];
  wait_for_previous_kernel();
  const int64_t entry = blockIdx.x;
  const int64_t row =
      row_of(static_cast<const Index*>(p.pattern.crow), static_cast<int>(p.pattern.rows), entry);
  const int64_t other = static_cast<const Index*>(p.pattern.col)[entry];
  const T* left = static_cast<const T*>(p.left.data) + row * p.left.row_stride;
  const T* right = static_cast<const T*>(p.right.data) + other * p.right.row_stride;
  C sum = 0;
  for (int64_t first = threadIdx.x; first < p.width; first += U * kEntryThreads) {
    C x[U], y[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int64_t column = first + u * kEntryThreads;
      x[u] = column < p.width ? convert<C>(__ldg(left + column)) : C(0);
      y[u] = column < p.width ? convert<C>(__ldg(right + column * p.column_stride)) : C(0);
    }
#pragma unroll
    for (int u = 0; u < U; ++u) sum += x[u] * y[u];
  }
  sum = reduce_warp(sum);
  if (threadIdx.x % kWarpLanes == 0) parts[threadIdx.x / kWarpLanes] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kEntryThreads / kWarpLanes; ++w) sum += parts[w];
  static_cast<T*>(p.out)[entry] = convert<T>(sum);
}

}  // namespace

Status sampled_product(const SampledProduct& p, CUstream_st* stream) {
  const int64_t outputs = p.summed ? 1 : p.batch;
  if (outputs * p.pattern.rows * p.pattern.entries == 0) return {};
  if (const char* reason = too_large(p.pattern, p.right.row_stride)) return {reason};
  const SampledPlan plan = choose(p);
  return dispatch_sparse(
      p.dtype, p.pattern.wide, lanes_of(p), [&](auto type, auto index, auto vector) {
        using T = typename decltype(type)::type;
        using Index = typename decltype(index)::type;
        const auto launch = [&](const auto& made) {
          using Made = std::decay_t<decltype(made)>;
          if constexpr (std::is_same_v<Made, EntriesPlan>) {
            if (trace::Listener* listener = trace::listening())
              listener->noted("one block per entry");
            if (made.blocks > kMaxGridX) return Status{"too many entries for one launch"};
            const Grid grid{dim3(static_cast<unsigned>(made.blocks)), dim3(kEntryThreads)};
            return launch_overlapped(sampled_entries<T, Index>, grid, stream, p);
          } else {
            if (made.blocks > kMaxGridX) return Status{"too many rows for one launch"};
            const Grid grid{dim3(static_cast<unsigned>(made.blocks)), dim3(kThreads)};
            return launch_overlapped(sampled_pieces<typename Made::Flight, T, Index, vector>, grid,
                                     stream, p, made.units, made.blocks_per_matrix);
          }
        };
        return std::visit(launch, plan);
      });
}

}  // namespace torchkiln::cuda
