// Patterns of sparse matrices: transposition and validation. choose_transpose.h selects how a
// pattern is transposed:
//
//   ranks      ranks.cuh: few entries, each of which counts the entries before it
//   counting   counters of all columns in shared memory, in one or two launches
//   radix      radix sort by column, in six launches or more

#include <cub/block/block_scan.cuh>
#include <cub/device/device_radix_sort.cuh>

#include "ops/spmm/ranks.cuh"

namespace torchkiln::cuda {

using namespace device;
using namespace sparse;
namespace {

constexpr int kThreads = kLabelThreads;
constexpr int kItems = kLabelItems;

/// Arrays for the transposition, with one element per entry of every matrix.
struct Entries {
  uint32_t* key;  // matrix * columns + column
  uint32_t* sorted_key;
  int32_t* index;  // index among all entries
  int32_t* sorted_index;
  int32_t* row;
  void* temporary;
  size_t temporary_bytes;
};

constexpr size_t kArrays = 5;

size_t array_bytes(const CsrTranspose& p) {
  return static_cast<size_t>(ceil_div(p.batch * p.pattern.entries, 64) * 64) * sizeof(int32_t);
}

/// Radix sort is stable, so the entries of a column remain ordered by row.
cudaError_t sort(const CsrTranspose& p, Entries& entries, cudaStream_t stream) {
  const int64_t most = p.batch * p.pattern.columns;
  int bits = 1;
  while (bits < 32 && int64_t{1} << bits < most) ++bits;
  return cub::DeviceRadixSort::SortPairs(
      entries.temporary, entries.temporary_bytes, entries.key, entries.sorted_key, entries.index,
      entries.sorted_index, static_cast<int32_t>(p.batch * p.pattern.entries), 0, bits, stream);
}

/// Writes key, index and row of each entry. A warp has 32 * kItems entries and finds the rows of
/// its first and its last entry. Each thread then searches only between these two rows.
template <class Index>
__global__ void __launch_bounds__(kThreads)
    label_entries(CsrTranspose p, Entries to, int64_t blocks_per_matrix) {
  wait_for_previous_kernel();
  const int64_t matrix = blockIdx.x / blocks_per_matrix;
  const int64_t warp =
      ((blockIdx.x - matrix * blocks_per_matrix) * kThreads + threadIdx.x) / warpSize;
  const int64_t first = warp * warpSize * kItems;
  const int64_t last = min(first + warpSize * kItems, p.pattern.entries);
  if (first >= last) return;
  const Index* crow = begins_of<Index>(p.pattern, matrix);
  const Index* col = columns_of<Index>(p.pattern, matrix);
  const int rows = static_cast<int>(p.pattern.rows);
  const int first_row = row_of(crow, rows, first);
  const int last_row = row_of(crow, rows, last - 1);
  for (int64_t e = first + threadIdx.x % warpSize; e < last; e += warpSize) {
    const int64_t index = matrix * p.pattern.entries + e;
    to.key[index] = static_cast<uint32_t>(matrix * p.pattern.columns + col[e]);
    to.index[index] = static_cast<int32_t>(index);
    to.row[index] = row_between(crow, first_row, last_row, e);
  }
}

/// Thread i of a matrix writes entry i of the result, and the begin of its row i.
__global__ void __launch_bounds__(kThreads)
    pack_transpose(CsrTranspose p, Entries from, int64_t blocks_per_matrix, int64_t size) {
  wait_for_previous_kernel();
  const int64_t matrix = blockIdx.x / blocks_per_matrix;
  const int64_t i = (blockIdx.x - matrix * blocks_per_matrix) * kThreads + threadIdx.x;
  const int64_t entries = p.pattern.entries;
  const int64_t begin = matrix * entries;
  int32_t* crow = p.out + matrix * size;
  int32_t* col = crow + p.pattern.columns + 1;
  if (i < entries) {
    const int32_t index = from.sorted_index[begin + i];
    col[i] = from.row[index];
    col[entries + i] = static_cast<int32_t>(index - begin);
  }
  if (i <= p.pattern.columns) {
    const int64_t key = matrix * p.pattern.columns + i;
    int64_t low = 0;  // entries before `low` have smaller keys
    int64_t high = entries;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (from.sorted_key[begin + middle] < key) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    crow[i] = static_cast<int32_t>(low);
  }
}

__device__ __forceinline__ void set_to_zero(int* shared, int count) {
  for (int i = threadIdx.x; i < count; i += kSortThreads) shared[i] = 0;
  __syncthreads();
}

/// Counts the columns of the entries first <= e < last.
template <class Index>
__device__ __forceinline__ void count_entries(const Index* col, int64_t first, int64_t last,
                                              int* totals) {
  for (int64_t e = first + threadIdx.x; e < last; e += kSortThreads) atomicAdd(&totals[col[e]], 1);
  __syncthreads();
}

/// Counts the columns in the entries of each block.
template <class Index>
__global__ void __launch_bounds__(kSortThreads)
    count_columns(CsrTranspose p, CountingPlan plan, int32_t* counts) {
  extern __shared__ int totals[];
  wait_for_previous_kernel();
  const int64_t matrix = blockIdx.x / plan.blocks;
  const int64_t size = int64_t{kSortThreads} * plan.rounds;
  const int64_t first = (blockIdx.x - matrix * plan.blocks) * size;
  const int columns = static_cast<int>(p.pattern.columns);
  set_to_zero(totals, columns);
  count_entries(columns_of<Index>(p.pattern, matrix), first, min(first + size, p.pattern.entries),
                totals);
  int32_t* to = counts + int64_t{blockIdx.x} * columns;
  for (int c = threadIdx.x; c < columns; c += kSortThreads) to[c] = totals[c];
}

/// Writes the entries of a block to their sorted positions. `counts`: the result of
/// count_columns(). It is null if a matrix has one block, which counts its own entries.
template <class Index>
__global__ void __launch_bounds__(kSortThreads)
    place_entries(CsrTranspose p, CountingPlan plan, const int32_t* counts, int64_t packed) {
  using Scan = cub::BlockScan<int, kSortThreads>;
  static_assert(sizeof(typename Scan::TempStorage) <= kScanBytes);
  __shared__ typename Scan::TempStorage scan_storage;
  extern __shared__ int totals[];  // entries per column, then the next position per column
  wait_for_previous_kernel();
  const int64_t matrix = blockIdx.x / plan.blocks;
  const int64_t block = blockIdx.x - matrix * plan.blocks;
  const int64_t entries = p.pattern.entries;
  const int64_t size = int64_t{kSortThreads} * plan.rounds;
  const int64_t last = min((block + 1) * size, entries);
  const int columns = static_cast<int>(p.pattern.columns);
  const int rows = static_cast<int>(p.pattern.rows);
  const Index* crow = begins_of<Index>(p.pattern, matrix);
  const Index* col = columns_of<Index>(p.pattern, matrix);
  int32_t* begins = p.out + matrix * packed;
  int32_t* row_to = begins + columns + 1;
  int32_t* order_to = row_to + entries;

  int* next_place = totals + columns;
  set_to_zero(totals, 2 * columns);
  if (counts == nullptr) {
    count_entries(col, 0, entries, totals);
  } else {
    counts += matrix * plan.blocks * columns;
    const int before = static_cast<int>(block) * columns;  // counts of the blocks before this one
#pragma unroll 8
    for (int i = threadIdx.x; i < static_cast<int>(plan.blocks) * columns; i += kSortThreads) {
      const int count = counts[i];
      atomicAdd(&totals[i % columns], count);
      if (i < before) atomicAdd(&next_place[i % columns], count);
    }
    __syncthreads();
  }
  int begin = 0;  // first position of column `base`
  for (int base = 0; base < columns; base += kSortThreads) {
    const int c = base + static_cast<int>(threadIdx.x);
    int smaller = 0;  // entries in the columns from `base` to c
    int sum = 0;
    Scan(scan_storage).ExclusiveSum(c < columns ? totals[c] : 0, smaller, sum);
    if (c < columns) {
      next_place[c] += begin + smaller;
      if (block == 0) begins[c] = begin + smaller;
    }
    begin += sum;
    __syncthreads();  // before the storage is used again and positions are read
  }
  if (block == 0 && threadIdx.x == 0) begins[columns] = static_cast<int32_t>(entries);

  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  for (int64_t first = block * size; first < last; first += kSortThreads) {
    const int64_t e = first + threadIdx.x;
    const bool is_there = e < last;
    const int column = is_there ? static_cast<int>(col[e]) : -1;
    int row = 0;
    if (e - lane < last) {  // equal for all lanes of a warp
      const int first_row = row_of(crow, rows, e - lane);
      const int last_row = row_of(crow, rows, min(e - lane + kWarpLanes, last) - 1);
      row = row_between(crow, first_row, last_row, min(e, last - 1));
    }
    const unsigned same = __match_any_sync(~0u, column);
    const int rank = __popc(same & ((1u << lane) - 1));
    // Warps write one after the other, so that the entries of a column keep their order.
    const int count = static_cast<int>(min(last - first, int64_t{kSortThreads}));
    int place = 0;
    for (int turn = 0; turn * kWarpLanes < count; ++turn) {
      if (warp == turn && is_there) place = next_place[column] + rank;
      __syncwarp();
      if (warp == turn && is_there && rank == 0) next_place[column] += __popc(same);
      __syncthreads();
    }
    if (is_there) {
      row_to[place] = row;
      order_to[place] = static_cast<int32_t>(e);
    }
  }
}

/// One warp per row. Row ends that are wrong are clamped to the entries.
template <class Index>
__global__ void __launch_bounds__(kThreads) check_rows(CsrCheck p, int64_t blocks_per_matrix) {
  wait_for_previous_kernel();
  const int64_t matrix = blockIdx.x / blocks_per_matrix;
  const int64_t thread = (blockIdx.x - matrix * blocks_per_matrix) * kThreads + threadIdx.x;
  const int64_t row = thread / warpSize;
  if (row > p.pattern.rows) return;
  const Index* crow = begins_of<Index>(p.pattern, matrix);
  const Index* col = columns_of<Index>(p.pattern, matrix);
  const int64_t entries = p.pattern.entries;
  int faults = 0;
  const auto report = [&](CsrFault fault, bool is_there) {
    if (is_there) faults |= static_cast<int>(fault);
  };
  const int64_t begin = crow[row];
  if (row == p.pattern.rows) {
    report(CsrFault::end, begin != entries);
  } else {
    const int64_t end = crow[row + 1];
    report(CsrFault::begin, row == 0 && begin != 0);
    report(CsrFault::order, begin > end);
    const int64_t stop = min(end, entries);
    for (int64_t e = max(begin, int64_t{0}) + threadIdx.x % warpSize; e < stop; e += warpSize) {
      report(CsrFault::column, col[e] < 0 || col[e] >= p.pattern.columns);
      report(CsrFault::unsorted, e > begin && e > 0 && col[e - 1] >= col[e]);
    }
  }
  if (faults != 0) atomicOr(p.faults, faults);
}

template <class Body>
Status with_index(bool wide, const Body& body) {
  return wide ? body(TypeTag<int64_t>{}) : body(TypeTag<int32_t>{});
}

Status count_and_place(const CsrTranspose& p, const CountingPlan& plan, Allocate allocate,
                       cudaStream_t stream) {
  const int64_t columns = p.pattern.columns;
  const int64_t blocks = plan.blocks * p.batch;
  if (blocks > kMaxGridX) return {"too many matrices for one launch"};
  Grid grid{dim3(static_cast<unsigned>(blocks)), dim3(kSortThreads)};
  grid.shared_bytes = counter_bytes(p.pattern);
  int32_t* counts = nullptr;
  if (plan.blocks > 1)
    counts =
        static_cast<int32_t*>(allocate(static_cast<size_t>(blocks * columns) * sizeof(int32_t)));
  return with_index(p.pattern.wide, [&](auto index) {
    using Index = typename decltype(index)::type;
    if (counts != nullptr) {
      const Status counted = launch_overlapped(count_columns<Index>, grid, stream, p, plan, counts);
      if (!counted.ok()) return counted;
    }
    return launch_overlapped(place_entries<Index>, grid, stream, p, plan,
                             static_cast<const int32_t*>(counts),
                             packed_size(columns, p.pattern.entries));
  });
}

Status rank(const CsrTranspose& p, const RankPlan& plan, cudaStream_t stream) {
  const Grid grid{dim3(static_cast<unsigned>(plan.blocks * p.batch)), dim3(kRankThreads)};
  return with_index(p.pattern.wide, [&](auto index) {
    return launch_overlapped(rank_entries<typename decltype(index)::type>, grid, stream, p, plan);
  });
}

Status sort_by_column(const CsrTranspose& p, const RadixPlan& plan, Allocate allocate,
                      cudaStream_t stream) {
  Entries entries{};
  if (const cudaError_t error = sort(p, entries, stream); error != cudaSuccess)
    return status_of(error);
  const size_t bytes = array_bytes(p);
  char* memory = static_cast<char*>(allocate(kArrays * bytes + entries.temporary_bytes));
  entries.key = reinterpret_cast<uint32_t*>(memory);
  entries.sorted_key = reinterpret_cast<uint32_t*>(memory + bytes);
  entries.index = reinterpret_cast<int32_t*>(memory + 2 * bytes);
  entries.sorted_index = reinterpret_cast<int32_t*>(memory + 3 * bytes);
  entries.row = reinterpret_cast<int32_t*>(memory + 4 * bytes);
  entries.temporary = memory + kArrays * bytes;
  if (p.pattern.entries > 0) {
    const Grid grid{dim3(static_cast<unsigned>(plan.label_blocks * p.batch)), dim3(kThreads)};
    const Status labelled = with_index(p.pattern.wide, [&](auto index) {
      return launch_overlapped(label_entries<typename decltype(index)::type>, grid, stream, p,
                               entries, plan.label_blocks);
    });
    if (!labelled.ok()) return labelled;
    if (const cudaError_t error = sort(p, entries, stream); error != cudaSuccess)
      return status_of(error);
  }
  const int64_t blocks = plan.pack_blocks * p.batch;
  if (blocks > kMaxGridX) return {"too many columns for one launch"};
  return launch_overlapped(pack_transpose, {dim3(static_cast<unsigned>(blocks)), dim3(kThreads)},
                           stream, p, entries, plan.pack_blocks,
                           packed_size(p.pattern.columns, p.pattern.entries));
}

}  // namespace

Status csr_transpose(const CsrTranspose& p, Allocate allocate, CUstream_st* stream) {
  const int64_t all = p.batch * p.pattern.entries;
  if (p.batch == 0) return {};
  if (all >= int64_t{1} << 31 || p.batch * p.pattern.columns >= int64_t{1} << 32)
    return {"the transposed pattern of 2^31 entries or more is not built, expected fewer"};
  const TransposePlan plan = choose(p);
  if (const auto* ranks = std::get_if<RankPlan>(&plan)) return rank(p, *ranks, stream);
  if (const auto* counting = std::get_if<CountingPlan>(&plan))
    return count_and_place(p, *counting, allocate, stream);
  return sort_by_column(p, std::get<RadixPlan>(plan), allocate, stream);
}

Status csr_check(const CsrCheck& p, CUstream_st* stream) {
  const int64_t blocks = ceil_div(p.pattern.rows + 1, kThreads / kWarpLanes);
  if (blocks * p.batch > kMaxGridX) return {"too many rows for one launch"};
  if (p.batch == 0) return {};
  return with_index(p.pattern.wide, [&](auto index) {
    return launch_overlapped(check_rows<typename decltype(index)::type>,
                             {dim3(static_cast<unsigned>(blocks * p.batch)), dim3(kThreads)},
                             stream, p, blocks);
  });
}

}  // namespace torchkiln::cuda
