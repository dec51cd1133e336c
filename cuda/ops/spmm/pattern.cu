// Patterns of sparse matrices: transposition and validation.

#include <cub/device/device_radix_sort.cuh>

#include "detail/sparse/csr_split.cuh"
#include "torchkiln/device/vec.cuh"

namespace torchkiln::cuda {

using namespace device;
using namespace sparse;
namespace {

constexpr int kThreads = 256;
constexpr int kItems = 4;  // entries per thread

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

/// Radix sort is stable, so the entries of a column stay ordered by row.
cudaError_t sort(const CsrTranspose& p, Entries& entries, cudaStream_t stream) {
  const int64_t most = p.batch * p.pattern.columns;
  int bits = 1;
  while (bits < 32 && int64_t{1} << bits < most) ++bits;
  return cub::DeviceRadixSort::SortPairs(
      entries.temporary, entries.temporary_bytes, entries.key, entries.sorted_key, entries.index,
      entries.sorted_index, static_cast<int32_t>(p.batch * p.pattern.entries), 0, bits, stream);
}

/// Writes key, index and row of each entry. A warp takes 32 * kItems entries and finds the rows of
/// the first and the last; each thread then searches between these rows.
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
  const auto* crow =
      static_cast<const Index*>(p.pattern.crow) + matrix * p.pattern.crow_batch_stride;
  const auto* col = static_cast<const Index*>(p.pattern.col) + matrix * p.pattern.col_batch_stride;
  const int rows = static_cast<int>(p.pattern.rows);
  const int first_row = row_of(crow, rows, first);
  const int last_row = row_of(crow, rows, last - 1);
  for (int64_t e = first + threadIdx.x % warpSize; e < last; e += warpSize) {
    int low = first_row;
    for (int high = last_row + 1; high - low > 1;) {
      const int middle = low + (high - low) / 2;
      (crow[middle] <= e ? low : high) = middle;
    }
    const int64_t index = matrix * p.pattern.entries + e;
    to.key[index] = static_cast<uint32_t>(matrix * p.pattern.columns + col[e]);
    to.index[index] = static_cast<int32_t>(index);
    to.row[index] = low;
  }
}

/// Thread i of a matrix writes entry i, and finds where row i begins.
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

/// One warp per row. Row ends that are wrong are clamped to the entries.
template <class Index>
__global__ void __launch_bounds__(kThreads) check_rows(CsrCheck p, int64_t blocks_per_matrix) {
  wait_for_previous_kernel();
  const int64_t matrix = blockIdx.x / blocks_per_matrix;
  const int64_t thread = (blockIdx.x - matrix * blocks_per_matrix) * kThreads + threadIdx.x;
  const int64_t row = thread / warpSize;
  if (row > p.pattern.rows) return;
  const auto* crow =
      static_cast<const Index*>(p.pattern.crow) + matrix * p.pattern.crow_batch_stride;
  const auto* col = static_cast<const Index*>(p.pattern.col) + matrix * p.pattern.col_batch_stride;
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

}  // namespace

Status csr_transpose(const CsrTranspose& p, Allocate allocate, CUstream_st* stream) {
  const int64_t all = p.batch * p.pattern.entries;
  if (p.batch == 0) return {};
  if (all >= int64_t{1} << 31 || p.batch * p.pattern.columns >= int64_t{1} << 32)
    return {"the transposed pattern of 2^31 entries or more is not built, expected fewer"};
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
  if (all > 0) {
    const int64_t blocks = ceil_div(p.pattern.entries, kThreads * kItems);
    const Status labelled = with_index(p.pattern.wide, [&](auto index) {
      return launch_overlapped(label_entries<typename decltype(index)::type>,
                               {dim3(static_cast<unsigned>(blocks * p.batch)), dim3(kThreads)},
                               stream, p, entries, blocks);
    });
    if (!labelled.ok()) return labelled;
    if (const cudaError_t error = sort(p, entries, stream); error != cudaSuccess)
      return status_of(error);
  }
  const int64_t blocks = ceil_div(max(p.pattern.entries, p.pattern.columns + 1), kThreads);
  if (blocks * p.batch > kMaxGridX) return {"too many columns for one launch"};
  return launch_overlapped(pack_transpose,
                           {dim3(static_cast<unsigned>(blocks * p.batch)), dim3(kThreads)}, stream,
                           p, entries, blocks, packed_size(p.pattern.columns, p.pattern.entries));
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
