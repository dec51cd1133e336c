// out[b] = A[b] dense[b] for sparse matrices in compressed rows. A group of lanes reads a row of
// the dense matrix for each entry. Long rows are cut into pieces, so that none delays the launch:
// detail/sparse/csr_split.cuh. sampled.cu has the gradient of the values, pattern.cu transposition
// and validation.

#include "detail/sparse/csr_launch.cuh"

namespace torchkiln::cuda {

using namespace device;
using namespace sparse;
namespace {

constexpr int kThreads = 128;
constexpr int kWarpLog2 = 5;  // a warp works on a chunk

/// How threads read the dense matrix: vectors of adjacent elements of a row, which are adjacent in
/// memory (kRows) or not (kColumns); or elements of a row that are spaced by a warp, because rows
/// are aligned to single elements (kSpaced).
enum class Access { kRows, kColumns, kSpaced };

/// Rows of the dense matrix in flight per thread: 8 vectors, or at most 32 single elements.
template <Access kAccess, int V>
constexpr int kUnroll = kAccess == Access::kSpaced && V == 8 ? 4 : 8;

/// Blocks per SM: 64 registers per thread for float32. Other types need more: 2-byte types widen 8
/// rows of 16 bytes to 32 bytes each, float64 has 64-bit weights. Columns have more addresses.
template <class T, Access kAccess>
constexpr int kBlocks = kAccess == Access::kColumns  ? 4
                        : kAccess == Access::kSpaced ? 5
                        : sizeof(T) == sizeof(float) ? 8
                                                     : 6;

/// How a piece is divided among threads, and the blocks of a launch, innermost first. A group of
/// lanes reads a row of the dense matrix, one vector per lane. If rows are narrow, several groups
/// (splits) alternate over the entries, and their sums are added at the end in a fixed order:
///
///   entries      e0     e1     e2     e3          splits = 2, lanes = 4
///   thread     0 1 2 3       0 1 2 3                (lane 0 ... 3 of split 0)
///                     4 5 6 7       4 5 6 7         (lane 0 ... 3 of split 1)
///
/// All pieces of one tile of columns start before the pieces of the next tile, so that rows of the
/// dense matrix that they share are found in the caches.
struct Plan {
  int lanes_log2;
  Units units;
  int64_t blocks_per_tile;
  int64_t tiles;
};

/// Chunks of the usual size. Few long rows, as those of the transpose of a tall matrix, get smaller
/// ones: their warps alone would leave most of the GPU idle. The parts of a row are then added one
/// after the other, so a longer row has longer ones.
Chunks chunks_for(const CsrPattern& pattern, int64_t tiles, int lanes_log2) {
  constexpr int64_t kUsual = 512;   // fewer entries take less time than the search for their rows
  constexpr int64_t kWarps = 4096;  // about what a GPU runs at a time
  const int least = min(128, 1024 >> lanes_log2);  // four rounds of a warp, or one
  if (4 * pattern.rows * tiles >= kWarps || pattern.entries <= min(256, 4 * least) * pattern.rows)
    return make_chunks(pattern, kUsual);
  int64_t size = least;
  while (size < kUsual && (size * kWarps < pattern.entries * tiles ||
                           2 * size * size * pattern.rows < pattern.entries))
    size *= 2;
  return {size, ceil_div(pattern.entries, size)};
}

/// Whether `lanes` spaced elements per thread leave enough warps for the GPU.
bool is_spaced(const Spmm& p, int lanes) {
  constexpr int64_t kFewWarps = 1024;
  return p.column_stride == 1 && p.width > 2 * kWarpLanes &&
         p.batch * p.pattern.rows * ceil_div(p.width, lanes * kWarpLanes) >= kFewWarps;
}

Plan make_plan(const Spmm& p, int vector, Access access) {
  Plan plan{};
  const int64_t vectors = ceil_div(p.width, vector);
  // Few columns at a time, so that the sectors that rows share are found in the caches.
  const int most_log2 = p.column_stride == 1 ? 5 : 1;
  while (plan.lanes_log2 < most_log2 && 1 << plan.lanes_log2 < vectors) ++plan.lanes_log2;
  if (access == Access::kSpaced) plan.lanes_log2 = kWarpLog2;
  const int64_t mean = p.pattern.entries / p.pattern.rows;
  // Two splits of half a warp, if the second half of a warp would read nothing in the last tile.
  const bool is_half = vectors > 32 && vectors <= 128 && (vectors - 1) % 32 < 16;
  if (access == Access::kRows && is_half && mean >= 16) --plan.lanes_log2;
  plan.tiles = ceil_div(vectors, 1 << plan.lanes_log2);
  // One warp per row if a split still has a few entries: rows of different lengths then do not wait
  // for each other.
  plan.units.chunks = chunks_for(p.pattern, plan.tiles, plan.lanes_log2);
  int splits_log2 = 0;
  while (plan.lanes_log2 + splits_log2 < 5 && 4 << splits_log2 <= mean) ++splits_log2;
  plan.units.group_log2 = plan.lanes_log2 + splits_log2;
  plan.blocks_per_tile = ceil_div(thread_count(p.pattern, plan.units, kWarpLog2), kThreads);
  return plan;
}

int lanes_of(const Spmm& p) {
  if (p.column_stride != 1) {
    const int lanes = vector_lanes(p.dtype);
    return rows_in_vectors(p.out, lanes, {p.width}) ? lanes : 1;
  }
  return min(sparse::lanes_of(p.dense, p.width, p.dtype),
             sparse::lanes_of({p.out, p.width, 0}, p.width, p.dtype));
}

template <class T, class Index, int V, Access kAccess>
__global__ void __launch_bounds__(kThreads, kBlocks<T, kAccess>) spmm_pieces(Spmm p, Plan plan) {
  using C = Compute<T>;
  constexpr int U = kUnroll<kAccess, V>;
  constexpr bool kIsSpaced = kAccess == Access::kSpaced;
  constexpr int kStep = kIsSpaced ? kWarpLanes : 1;  // between the elements of a thread
  wait_for_previous_kernel();
  const int64_t block = blockIdx.x / plan.blocks_per_tile;
  const int64_t in_tile = blockIdx.x - block * plan.blocks_per_tile;
  const int64_t batch = block / plan.tiles;
  const int64_t tile = block - batch * plan.tiles;
  const auto* crow =
      static_cast<const Index*>(p.pattern.crow) + batch * p.pattern.crow_batch_stride;
  const auto* col = static_cast<const Index*>(p.pattern.col) + batch * p.pattern.col_batch_stride;
  const T* values = static_cast<const T*>(p.values) + batch * p.values_batch_stride;
  const int32_t* order = p.order == nullptr ? nullptr : p.order + batch * p.order_batch_stride;
  const int lane = threadIdx.x & ((1 << plan.lanes_log2) - 1);
  const int64_t column = (tile << plan.lanes_log2) * V + lane * (kIsSpaced ? 1 : V);
  const bool inside = column < p.width;
  // The elements of a thread that are inside. The width is a multiple of a vector, so a vector is
  // inside as a whole.
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

/// The blocks of a chunk, which share the columns, add the partial results of the long row that
/// begins in it and continues after it, if there is one.
template <class T, class Index>
__global__ void __launch_bounds__(kThreads) add_parts(Spmm p, Chunks chunks) {
  using C = Compute<T>;
  wait_for_previous_kernel();
  const int64_t batch = blockIdx.x / chunks.count;
  const int64_t chunk = blockIdx.x - batch * chunks.count;
  const auto* crow =
      static_cast<const Index*>(p.pattern.crow) + batch * p.pattern.crow_batch_stride;
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

/// The division of work as text, for torchkiln.explain().
const char* describe(const Spmm& p, const Plan& plan) {
  const bool is_split = plan.units.chunks.count > 0;
  if (p.column_stride != 1) return "columns of the dense matrix, without a copy in rows";
  if (plan.units.group_log2 == 5)
    return is_split ? "one warp per row, long rows split" : "one warp per row";
  return is_split ? "several rows per warp, long rows split" : "several rows per warp";
}

}  // namespace

Status spmm(const Spmm& arguments, Allocate allocate, CUstream_st* stream) {
  if (arguments.batch * arguments.pattern.rows * arguments.width == 0) return {};
  if (const char* reason = too_large(arguments.pattern, arguments.dense.row_stride))
    return {reason};
  return dispatch_sparse(
      arguments.dtype, arguments.pattern.wide, lanes_of(arguments),
      [&](auto type, auto index, auto vector) {
        using T = typename decltype(type)::type;
        using Index = typename decltype(index)::type;
        Spmm p = arguments;
        constexpr int kSpacedLanes = kVectorLanes<T>;
        // Also for vectors of two 2-byte elements, if a warp does little more than find its row.
        constexpr bool kIsShort = 4 * vector <= kSpacedLanes;
        const bool spaced = (vector == 1 || (kIsShort && p.pattern.entries < 4 * p.pattern.rows)) &&
                            is_spaced(p, kSpacedLanes);
        const Plan plan = make_plan(p, spaced ? kSpacedLanes : static_cast<int>(vector),
                                    spaced                 ? Access::kSpaced
                                    : p.column_stride != 1 ? Access::kColumns
                                                           : Access::kRows);
        if (trace::Listener* listener = trace::listening()) listener->noted(describe(p, plan));
        const int64_t chunks = plan.units.chunks.count * p.batch;
        const int64_t blocks = plan.blocks_per_tile * plan.tiles * p.batch;
        if (blocks > kMaxGridX || chunks > kMaxGridX) return Status{"too many rows for one launch"};
        p.workspace = allocate(static_cast<size_t>(2 * chunks * p.width) * sizeof(Compute<T>));
        auto kernel = spmm_pieces<T, Index, vector, Access::kRows>;
        if constexpr (vector == 1 || vector == kVectorLanes<T>)
          if (p.column_stride != 1) kernel = spmm_pieces<T, Index, vector, Access::kColumns>;
        if constexpr (vector == 1 || kIsShort)
          if (spaced) kernel = spmm_pieces<T, Index, kSpacedLanes, Access::kSpaced>;
        const Grid grid{dim3(static_cast<unsigned>(blocks)), dim3(kThreads)};
        const Status status = launch_overlapped(kernel, grid, stream, p, plan);
        if (!status.ok() || chunks == 0) return status;
        // A block of a chunk without a long row searches in vain, so few chunks have several.
        const int64_t shares = min(ceil_div(p.width, kThreads), max(2048 / chunks, int64_t{1}));
        const dim3 adding(static_cast<unsigned>(chunks), static_cast<unsigned>(shares));
        return launch_overlapped(add_parts<T, Index>, {adding, dim3(kThreads)}, stream, p,
                                 plan.units.chunks);
      });
}

}  // namespace torchkiln::cuda
