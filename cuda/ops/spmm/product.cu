// out[b] = A[b] dense[b] for sparse matrices in compressed rows. A group of lanes reads a row of
// the dense matrix for each entry. Long rows are cut into pieces, so that none delays the launch:
// detail/sparse/csr_split.cuh. choose.h selects how the dense matrix is read:
//
//   rows      vectors of a row, one per lane
//   columns   vectors of a row whose elements are not adjacent, if the matrix has few entries
//   spaced    elements of a row that are spaced by a warp, if its vectors are short
//
// A second kernel adds the parts of long rows. sampled.cu has the gradient of the values,
// pattern.cu transposition and validation.

#include "choose.h"
#include "detail/sparse/csr_launch.cuh"

namespace torchkiln::cuda {

using namespace device;
using namespace sparse;
namespace {

constexpr int kThreads = kSpmmThreads;

/// Rows of the dense matrix in flight per thread: 8 vectors, or at most 32 single elements.
template <Access kAccess, int V>
constexpr int kUnroll = kAccess == Access::kSpaced && V == 8 ? 4 : 8;

template <class T, class Index, int V, Access kAccess>
__global__ void __launch_bounds__(kThreads, spmm_blocks(sizeof(T), kAccess))
    spmm_pieces(Spmm p, SpmmWork plan) {
  using C = Compute<T>;
  constexpr int U = kUnroll<kAccess, V>;
  constexpr bool kIsSpaced = kAccess == Access::kSpaced;
  constexpr int kStep = kIsSpaced ? kWarpLanes : 1;  // columns between the elements of a thread
  wait_for_previous_kernel();
  const int64_t block = blockIdx.x / plan.blocks_per_tile;
  const int64_t in_tile = blockIdx.x - block * plan.blocks_per_tile;
  const int64_t batch = block / plan.tiles;
  const int64_t tile = block - batch * plan.tiles;
  const Index* crow = begins_of<Index>(p.pattern, batch);
  const Index* col = columns_of<Index>(p.pattern, batch);
  const T* values = static_cast<const T*>(p.values) + batch * p.values_batch_stride;
  const int32_t* order = p.order == nullptr ? nullptr : p.order + batch * p.order_batch_stride;
  const int lane = threadIdx.x & ((1 << plan.lanes_log2) - 1);
  const int64_t column = (tile << plan.lanes_log2) * V + lane * (kIsSpaced ? 1 : V);
  const bool inside = column < p.width;
  // The number of this thread's elements that are inside. The width is a multiple of a vector, so a
  // vector is either inside or outside as a whole.
  const int64_t reached = (p.width - column + kStep - 1) / kStep;
  const int count = kIsSpaced ? static_cast<int>(min(max(reached, int64_t{0}), int64_t{V})) : V;
  // A lane beyond the end reads the first columns, so that the loads need no condition.
  const T* dense = static_cast<const T*>(p.dense.data) + batch * p.dense.batch_stride +
                   (inside ? column : 0) * (kAccess == Access::kColumns ? p.column_stride : 1);
  const int row_stride = static_cast<int>(p.dense.row_stride);
  const auto load = [&](const int (&row_index)[U], Vec<T, V>(&rows)[U]) {
    if constexpr (kIsSpaced) {
      load_strided<V>(dense, row_stride, kWarpLanes, row_index, rows, count);
    } else if constexpr (kAccess == Access::kColumns) {
      load_strided<V>(dense, row_stride, p.column_stride, row_index, rows);
    } else {
      load_rows<V>(dense, row_stride, row_index, rows);
    }
  };
  const auto value_at = [&](Index e) {
    return convert<C>(
        __ldg(values + (order == nullptr ? e : static_cast<Index>(__ldg(order + e)))));
  };

  const auto multiply = [&](const Piece<Index>& piece, int group_log2) {
    const int splits = 1 << (group_log2 - plan.lanes_log2);
    const int split = threadIdx.x >> plan.lanes_log2 & (splits - 1);
    C sum[V] = {};
    int row_index[U];
    C weight[U];
    Vec<T, V> rows[U];
    const auto add = [&] {
#pragma unroll
      for (int u = 0; u < U; ++u) {
        C x[V];
        widen(rows[u], x);
#pragma unroll
        for (int i = 0; i < V; ++i) sum[i] += weight[u] * x[i];
      }
    };
    Index e = piece.begin + split;
    for (; e + (U - 1) * splits < piece.end; e += U * splits) {
#pragma unroll
      for (int u = 0; u < U; ++u) row_index[u] = static_cast<int>(__ldg(col + e + u * splits));
      load(row_index, rows);
#pragma unroll
      for (int u = 0; u < U; ++u) weight[u] = value_at(e + u * splits);
      add();
    }
    if (e < piece.end) {
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const Index one = e + u * splits;
        row_index[u] = one < piece.end ? static_cast<int>(__ldg(col + one)) : -1;
        weight[u] = one < piece.end ? value_at(one) : C(0);
      }
      load(row_index, rows);
      add();
    }
    for (int s = splits / 2; s > 0; s /= 2) {
#pragma unroll
      for (int i = 0; i < V; ++i)
        sum[i] += __shfl_down_sync(~0u, sum[i], static_cast<unsigned>(s) << plan.lanes_log2);
    }
    if (piece.row < 0 || split != 0 || !inside) return;
    if (piece.slot < 0) {
      const int64_t row = batch * p.pattern.rows + piece.row;
      T* out = static_cast<T*>(p.out) + row * p.width + column;
      if constexpr (!kIsSpaced) {
        store<V>(out, sum);
      } else {
#pragma unroll
        for (int i = 0; i < V; ++i)
          if (i < count) out[i * kStep] = convert<T>(sum[i]);
      }
    } else {
      const int64_t slot = batch * 2 * plan.units.chunks.count + piece.slot;
      C* partial = static_cast<C*>(p.workspace) + slot * p.width + column;
#pragma unroll
      for (int i = 0; i < V; ++i)
        if (i < count) partial[i * kStep] = sum[i];
    }
  };
  for_each_piece(p.pattern, crow, plan.units, kWarpLog2, in_tile * kThreads + threadIdx.x,
                 multiply);
}

/// The parts of the long row, if any, that begins in a chunk and continues after it. The blocks of
/// the chunk share the columns, and add these parts.
template <class T, class Index>
__global__ void __launch_bounds__(kThreads) add_parts(Spmm p, Chunks chunks) {
  using C = Compute<T>;
  wait_for_previous_kernel();
  const int64_t batch = blockIdx.x / chunks.count;
  const int64_t chunk = blockIdx.x - batch * chunks.count;
  const Index* crow = begins_of<Index>(p.pattern, batch);
  const int64_t first = chunk * chunks.size;
  const int64_t last = min(first + chunks.size, p.pattern.entries);
  const int row = row_of(crow, static_cast<int>(p.pattern.rows), last - 1);
  const int64_t begin = crow[row];
  const int64_t end = crow[row + 1];
  if (begin < first || end - begin <= chunks.size) return;
  const C* partial = static_cast<const C*>(p.workspace) + batch * 2 * chunks.count * p.width;
  T* out = static_cast<T*>(p.out) + (batch * p.pattern.rows + row) * p.width;
  for (int64_t column = blockIdx.y * kThreads + threadIdx.x; column < p.width;
       column += gridDim.y * kThreads) {
    C sum = partial[slot_of(chunks, chunk, begin) * p.width + column];
#pragma unroll 8
    for (int64_t k = chunk + 1; k * chunks.size < end; ++k)
      sum += partial[2 * k * p.width + column];
    out[column] = convert<T>(sum);
  }
}

/// The plan as text, for torchkiln.explain().
const char* describe(const SpmmPlan& plan) {
  const bool is_split = plan.chunks > 0;
  if (plan.access == Access::kColumns) return "columns of the dense matrix, without a copy in rows";
  if (plan.work.units.group_log2 == kWarpLog2)
    return is_split ? "one warp per row, long rows split" : "one warp per row";
  return is_split ? "several rows per warp, long rows split" : "several rows per warp";
}

}  // namespace

Status spmm(const Spmm& arguments, Allocate allocate, CUstream_st* stream) {
  if (arguments.batch * arguments.pattern.rows * arguments.width == 0) return {};
  if (const char* reason = too_large(arguments.pattern, arguments.dense.row_stride))
    return {reason};
  const SpmmPlan plan = choose(arguments);
  return dispatch_sparse(
      arguments.dtype, arguments.pattern.wide, plan.lanes, [&](auto type, auto index, auto vector) {
        using T = typename decltype(type)::type;
        using Index = typename decltype(index)::type;
        Spmm p = arguments;
        if (trace::Listener* listener = trace::listening()) listener->noted(describe(plan));
        if (plan.blocks > kMaxGridX || plan.chunks > kMaxGridX)
          return Status{"too many rows for one launch"};
        p.workspace = allocate(static_cast<size_t>(2 * plan.chunks * p.width) * sizeof(Compute<T>));
        constexpr int kWidest = kVectorLanes<T>;
        auto kernel = spmm_pieces<T, Index, vector, Access::kRows>;
        if constexpr (vector == 1 || vector == kWidest)
          if (plan.access == Access::kColumns)
            kernel = spmm_pieces<T, Index, vector, Access::kColumns>;
        if constexpr (vector == 1 || 4 * vector <= kWidest)
          if (plan.access == Access::kSpaced)
            kernel = spmm_pieces<T, Index, kWidest, Access::kSpaced>;
        const Grid grid{dim3(static_cast<unsigned>(plan.blocks)), dim3(kThreads)};
        const Status status = launch_overlapped(kernel, grid, stream, p, plan.work);
        if (!status.ok() || plan.chunks == 0) return status;
        const dim3 adding(static_cast<unsigned>(plan.chunks), static_cast<unsigned>(plan.shares));
        return launch_overlapped(add_parts<T, Index>, {adding, dim3(kThreads)}, stream, p,
                                 plan.work.units.chunks);
      });
}

}  // namespace torchkiln::cuda
