// The dot product of a row of `left` and a row of `right` for each entry of a sparse pattern: the
// gradient of the values of a product. Eight lanes read a row, eight entries are in flight.

#include "detail/sparse/csr_launch.cuh"

namespace torchkiln::cuda {

using namespace device;
using namespace sparse;
namespace {

constexpr int kThreads = 128;
constexpr int kLanes = 8;   // threads per row, which read 128 bytes at a time
constexpr int kUnroll = 8;  // entries whose rows are in flight together

/// Sums part[u] over kLanes lanes; lane u gets the sum of entry u. Each step halves the entries of
/// a lane, so that 8 sums over 8 lanes take 7 shuffles instead of 24.
template <class C>
__device__ __forceinline__ C sum_over_lanes(C (&part)[kUnroll], int lane) {
  static_assert(kUnroll == kLanes, "one entry for each lane");
#pragma unroll
  for (int n = kUnroll / 2; n > 0; n /= 2) {
    const bool is_upper = (lane & n) != 0;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const C kept = is_upper ? part[i + n] : part[i];
      const C other = is_upper ? part[i] : part[i + n];
      part[i] = kept + __shfl_xor_sync(~0u, other, n);
    }
  }
  return part[0];
}

/// Blocks per SM: 64 registers per thread for float32. Other types need more: 2-byte types widen 8
/// rows of 16 bytes to 32 bytes each.
template <class T>
constexpr int kBlocks = sizeof(T) == sizeof(float) ? 8 : 5;

template <class T, class Index, int V>
__global__ void __launch_bounds__(kThreads, kBlocks<T>)
    sampled_pieces(SampledProduct p, Units units, int64_t blocks_per_matrix) {
  using C = Compute<T>;
  constexpr int U = kUnroll;
  wait_for_previous_kernel();
  const int64_t batch = blockIdx.x / blocks_per_matrix;
  const int64_t in_matrix = blockIdx.x - batch * blocks_per_matrix;
  const auto* crow =
      static_cast<const Index*>(p.pattern.crow) + batch * p.pattern.crow_batch_stride;
  const auto* col = static_cast<const Index*>(p.pattern.col) + batch * p.pattern.col_batch_stride;
  const int64_t summed = p.summed ? p.batch : 1;
  const int row_stride = static_cast<int>(p.right.row_stride);
  const int lane = threadIdx.x % kLanes;

  // Groups of lanes alternate over the entries of a piece, U at a time.
  const auto multiply = [&](const Piece<Index>& piece, int group_log2) {
    const int splits = (1 << group_log2) / kLanes;
    const int split = threadIdx.x / kLanes & (splits - 1);
    const int64_t row = max(piece.row, 0) * p.left.row_stride;
    // All lanes take part in the shuffles, so each continues until the last one is done.
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
        for (int64_t column = lane * V; column < p.width; column += kLanes * V) {
          Vec<T, V> rows[U];
          load_rows<V>(right + column, row_stride, row_index, rows);
          C x[V];
          widen(load_constant<V>(left + column), x);
#pragma unroll
          for (int u = 0; u < U; ++u) {
            C y[V];
            widen(rows[u], y);
#pragma unroll
            for (int i = 0; i < V; ++i) part[u] += x[i] * y[i];
          }
        }
      }
      const C total = sum_over_lanes(part, lane);
      if (e + lane < piece.end)
        static_cast<T*>(p.out)[batch * p.pattern.entries + e + lane] = convert<T>(total);
    }
  };
  for_each_piece(p.pattern, crow, units, in_matrix * kThreads + threadIdx.x, multiply);
}

}  // namespace

Status sampled_product(const SampledProduct& p, CUstream_st* stream) {
  const int64_t outputs = p.summed ? 1 : p.batch;
  if (outputs * p.pattern.rows * p.pattern.entries == 0) return {};
  if (const char* reason = too_large(p.pattern, p.right.row_stride)) return {reason};
  const bool vectors =
      in_vectors(p.left, p.width, p.dtype) && in_vectors(p.right, p.width, p.dtype);
  return dispatch_sparse(p.dtype, p.pattern.wide, vectors, [&](auto type, auto index, auto vector) {
    Units units{make_chunks(p.pattern), 3};
    const int64_t mean = p.pattern.entries / p.pattern.rows;
    while (units.group_log2 < 5 && 2 * kUnroll << (units.group_log2 - 3) <= mean)
      ++units.group_log2;
    const int64_t blocks = ceil_div(thread_count(p.pattern, units), kThreads);
    if (blocks * outputs > kMaxGridX) return Status{"too many rows for one launch"};
    const Grid grid{dim3(static_cast<unsigned>(blocks * outputs)), dim3(kThreads)};
    return launch_overlapped(
        sampled_pieces<typename decltype(type)::type, typename decltype(index)::type, vector>, grid,
        stream, p, units, blocks);
  });
}

}  // namespace torchkiln::cuda
