// out = A^T x for one sparse matrix A of few columns, in a pass over the rows of A and x:
//
//   rows of A            weights of 64 or 128 rows, in shared memory, with a bit for each one that
//                        is stored: what is not stored must not multiply an infinity
//   rows of x            vectors, each of which is read once, by one thread
//   sums of a thread     registers, one vector for each column of A
//
// The sums are added over the threads of a block, then over the blocks that share the rows, both in
// an order that shape, alignment and device fix.

#include "choose_columns.h"
#include "detail/reduce/columns.cuh"
#include "detail/sparse/csr_launch.cuh"

namespace torchkiln::cuda {

using namespace device;
using namespace sparse;
namespace {

constexpr int kThreads = kColumnsThreads;

template <int kColumns>
constexpr int kStageRows = stage_rows(kColumns);
template <class T, int V>
constexpr int kInFlight = rows_in_flight(V * static_cast<int>(sizeof(T)));
template <class C, int kSums>
constexpr int kBatch = std::min(sums_at_a_time(sizeof(C)), kSums);
template <class T>
constexpr int kLanesOfMany =
    std::min(kMostBytesOfMany / static_cast<int>(sizeof(Compute<T>)), kVectorLanes<T>);

__device__ __forceinline__ int64_t index_at(const void* indices, bool wide, int64_t at) {
  return wide ? __ldg(static_cast<const long long*>(indices) + at)
              : __ldg(static_cast<const int*>(indices) + at);
}

/// Adds the values of a row to the weights of their columns, which are zeros. Returns a bit for
/// each column that is stored.
template <int kColumns, class T, class C>
__device__ __forceinline__ unsigned read_weights(const SpmmColumns& p, int64_t row, C* weights) {
  constexpr int U = 4;  // entries in flight
  const CsrPattern& a = p.pattern;
  const int64_t end = index_at(a.crow, a.wide, row + 1);
  unsigned stored = 0;
  for (int64_t e = index_at(a.crow, a.wide, row); e < end; e += U) {
    unsigned column[U];
    C value[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const bool is_there = e + u < end;
      column[u] = is_there ? static_cast<unsigned>(index_at(a.col, a.wide, e + u)) : ~0u;
      value[u] = is_there ? convert<C>(__ldg(static_cast<const T*>(p.values) + e + u)) : C(0);
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (column[u] >= kColumns) continue;
      weights[column[u]] += value[u];
      stored |= 1u << column[u];
    }
  }
  return stored;
}

/// Adds the sums of the threads that have the same columns of x, which are 1 << lanes_log2 threads
/// apart. The first of these threads get the results.
template <int kSums, class C>
__device__ __forceinline__ void add_threads(C (&sum)[kSums], int lanes_log2) {
  constexpr int B = kBatch<C, kSums>;
  static_assert(kSums % B == 0);
  __shared__ C of_threads[B][kThreads];
  for (int offset = kWarpLanes / 2; offset >= 1 << lanes_log2; offset /= 2)
    exchange(sum, offset, Sum{});
  const int step = max(1 << lanes_log2, kWarpLanes);
  if (step == kThreads) return;
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int first = 0; first < kSums; first += B) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < B; ++i) of_threads[i][thread] = sum[first + i];
    __syncthreads();
    if (thread >= step) continue;
#pragma unroll
    for (int i = 0; i < B; ++i)
      for (int other = thread + step; other < kThreads; other += step)
        sum[first + i] += of_threads[i][other];
  }
}

template <class T, int V, int kColumns>
__global__ void __launch_bounds__(kThreads, kColumnsBlocks)
    sum_rows(SpmmColumns p, ColumnsPlan plan, Compute<T>* partial) {
  using C = Compute<T>;
  constexpr int kRows = kStageRows<kColumns>;
  constexpr int U = kInFlight<T, V>;
  __shared__ C weights[kRows][kColumns];
  __shared__ unsigned stored[kRows];
  wait_for_previous_kernel();
  const int thread = static_cast<int>(threadIdx.x);
  const int groups = kThreads >> plan.lanes_log2;
  const int group = thread >> plan.lanes_log2;
  const int lane = thread & ((1 << plan.lanes_log2) - 1);
  const int64_t column = ((int64_t{blockIdx.x} << plan.lanes_log2) + lane) * V;
  const bool inside = column < p.width;
  const T* x = static_cast<const T*>(p.x.data) + (inside ? column : 0);
  const int64_t first = blockIdx.y * plan.rows;
  const int64_t last = min(first + plan.rows, p.pattern.rows);

  C sum[kColumns * V] = {};
  for (int64_t begin = first; begin < last; begin += kRows) {
    const int count = static_cast<int>(min(last - begin, int64_t{kRows}));
    __syncthreads();  // the weights of the previous rows were read
    if (thread < count) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) weights[thread][c] = C(0);
      stored[thread] = read_weights<kColumns, T>(p, begin + thread, weights[thread]);
    }
    __syncthreads();
    if (!inside) continue;
    for (int row = group; row < count; row += U * groups) {
      unsigned columns[U];
      Vec<T, V> items[U];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const int one = row + u * groups;
        columns[u] = one < count ? stored[one] : 0;
        items[u] = Vec<T, V>{};
        if (columns[u] != 0) items[u] = load_part<V>(x + (begin + one) * p.x.row_stride);
      }
#pragma unroll
      for (int u = 0; u < U; ++u) {
        if (columns[u] == 0) continue;
        C values[V];
        widen(items[u], values);
        const C* weight = weights[row + u * groups];
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          if ((columns[u] >> c & 1u) == 0) continue;
#pragma unroll
          for (int i = 0; i < V; ++i) sum[c * V + i] += weight[c] * values[i];
        }
      }
    }
  }
  add_threads(sum, plan.lanes_log2);
  if (group > 0 || !inside) return;
  const int64_t row = blockIdx.y * p.pattern.columns;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    if (c >= p.pattern.columns) break;
    C part[V];
#pragma unroll
    for (int i = 0; i < V; ++i) part[i] = sum[c * V + i];
    if (plan.chunks == 1) {
      store<V>(static_cast<T*>(p.out) + c * p.width + column, part);
    } else {
#pragma unroll
      for (int i = 0; i < V; ++i) partial[(row + c) * p.width + column + i] = part[i];
    }
  }
}

template <class T, int V, int kColumns>
Status launch_columns(const SpmmColumns& p, const ColumnsPlan& plan, Allocate allocate,
                      CUstream_st* stream) {
  using C = Compute<T>;
  if (plan.tiles > kMaxGridX) return {"too many columns for one launch"};
  const int64_t outputs = p.pattern.columns * p.width;
  C* partial = nullptr;
  if (plan.chunks > 1)
    partial = static_cast<C*>(allocate(static_cast<size_t>(plan.chunks * outputs) * sizeof(C)));
  const dim3 blocks(static_cast<unsigned>(plan.tiles), static_cast<unsigned>(plan.chunks));
  const Status status = launch_overlapped(sum_rows<T, V, kColumns>, {blocks, dim3(kThreads)},
                                          stream, p, plan, partial);
  if (!status.ok() || plan.chunks == 1) return status;
  const reduce::columns::Plan parts{1, 1, 1, plan.chunks, plan.chunks, outputs};
  return reduce::columns::queue_finish(static_cast<const C*>(partial), parts,
                                       reduce::Result{p.out, p.dtype, 1}, nullptr, stream);
}

}  // namespace

Status spmm_columns(const SpmmColumns& p, Allocate allocate, CUstream_st* stream) {
  if (p.pattern.rows * p.pattern.columns * p.width == 0) return {};
  if (const char* reason = too_large(p.pattern, p.x.row_stride)) return {reason};
  if (p.pattern.columns > kMostSums) return {"got many columns, expected at most 32"};
  const ColumnsPlan plan = choose(p, current_device());
  if (trace::Listener* listener = trace::listening())
    listener->noted("few columns: a pass over the rows, without a transposed pattern");
  return dispatch_floating(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (plan.columns == kFewestSums) {
      return with_lanes<kVectorLanes<T>>(plan.lanes, [&](auto lanes) {
        return launch_columns<T, lanes(), kFewestSums>(p, plan, allocate, stream);
      });
    }
    return with_lanes<kLanesOfMany<T>>(plan.lanes, [&](auto lanes) {
      return launch_columns<T, lanes(), kMostSums>(p, plan, allocate, stream);
    });
  });
}

}  // namespace torchkiln::cuda
