#pragma once

// Common to softmax and its gradient: which elements count, and the choice of a kernel.

#include "detail/rowwise/parts.cuh"
#include "detail/rowwise/tile.cuh"
#include "strided.cuh"

namespace torchkiln::cuda {
namespace {

/// One bit per lane of each of a thread's items: the lane belongs to the row and is not masked.
template <bool kMasked, class Tile>
class ActiveLanes {
 public:
  __device__ __forceinline__ void read(const Tile& tile, const RowMask& mask, int64_t row) {
    if constexpr (kMasked) {
      const MaskRow mask_row(mask, row);
#pragma unroll
      for (int k = 0; k < Tile::kItems; ++k) {
        bits_[k] = 0;
#pragma unroll
        for (int i = 0; i < Tile::lanes(k); ++i) {
          if (tile.has(k, i) && mask_row.allows(tile.column(k) + i)) bits_[k] |= 1u << i;
        }
      }
    }
  }

  __device__ __forceinline__ bool has(const Tile& tile, int k, int lane) const {
    if constexpr (kMasked) {
      return (bits_[k] >> lane & 1u) != 0;
    } else {
      return tile.has(k, lane);
    }
  }

 private:
  uint32_t bits_[kMasked ? Tile::kItems : 1];
};

/// Calls body(log, masked) with both flags as types. Masked kernels read the log flag at run time.
template <class Body>
Status with_flags(bool is_log, bool is_masked, const Body& body) {
  if (is_masked) return body(std::false_type{}, std::true_type{});
  return is_log ? body(std::true_type{}, std::false_type{})
                : body(std::false_type{}, std::false_type{});
}

/// A team holds a row in registers. Row: see rows_in_parts().
template <class Row, int kBlocks>
__global__ void __launch_bounds__(kRowThreads, kBlocks)
    rows_in_registers(typename Row::Problem p, TeamShape shape) {
  using C = typename Row::C;
  __shared__ TeamStorage<C, Row::kValues> storage;
  wait_for_previous_kernel();
  Team<C, Row::kValues> team(shape, storage);
  Row row(p, team.first_team() + team.index(), team.rank(), team.size());
  row.load();
  team.init_barriers();
  C values[Row::kValues];
  row.reduce(team, values);
  team.reduce_warps(values, typename Row::Op{});
  row.write(values);
}

/// Queues a kernel for the type that row(tile, log, masked) returns a tag of, if the elements of a
/// row are adjacent: rows are cut into parts if no team can hold them. Else queues
/// columns(type, log).
template <class Problem, int N, class RowType, class ColumnKernel>
Status queue(const Problem& p, const TensorRows (&tensors)[N], bool masked, const RowType& row,
             const ColumnKernel& columns, Allocate allocate, CUstream_st* stream) {
  if (p.outer * p.length * p.inner == 0) return {};
  if (p.length > kMaxColumns) return {kTooLong};
  const bool adjacent = p.inner == 1 && (p.stride == 1 || p.length == 1);
  return dispatch_floating(p.dtype, [&](auto tag) {
    using T = typename std::decay_t<decltype(tag)>::type;
    if (!adjacent) {
      const int64_t blocks = ceil_div(p.outer * p.inner, kColumns);
      if (blocks > kMaxGridX) return Status{"too many rows for one launch"};
      const unsigned depth = p.length >= 1024 ? kMaxRows : p.length >= 64 ? 8 : 2;
      const Grid grid{dim3(static_cast<unsigned>(blocks)), dim3(kColumns, depth)};
      return with_flags(p.log, false, [&](auto log, auto) {
        return launch_overlapped(columns(tag, log), grid, stream, p);
      });
    }
    const auto in_registers = [&](auto tile, const TeamShape& team) {
      Grid grid;
      const Status status = make_grid(team, p.outer, grid);
      if (!status.ok()) return status;
      return with_flags(p.log, masked, [&](auto log, auto is_masked) {
        using Tile = typename std::decay_t<decltype(tile)>::type;
        using Row = typename decltype(row(tile, log, is_masked))::type;
        return launch_overlapped(rows_in_registers<Row, kRowBlocks<Tile, N - 1>>, grid, stream, p,
                                 team);
      });
    };
    const Alignment alignment = alignment_of(tensors, p.dtype, p.outer, p.length);
    const auto in_parts = [&] {
      const auto launch = [&](auto tile, auto log, auto is_masked) {
        using Row = typename decltype(row(tile, log, is_masked))::type;
        return launch_in_parts<Row, 4>(p, p.outer, p.length, allocate, stream);
      };
      if (alignment == Alignment::scalar)
        return launch(TypeTag<PartTile<T, 4, false>>{}, std::false_type{}, std::true_type{});
      return with_flags(p.log, masked, [&](auto log, auto is_masked) {
        // As many registers for one tensor as for two, or for one and its mask.
        constexpr int kVectors = N > 2 || is_masked ? 4 : 8;
        return launch(TypeTag<PartTile<T, kVectors, true>>{}, log, is_masked);
      });
    };
    return with_tile<T>(alignment, p.length, N - 1, kRowThreads / 2, in_registers, in_parts);
  });
}

}  // namespace
}  // namespace torchkiln::cuda
