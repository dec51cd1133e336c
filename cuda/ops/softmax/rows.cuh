#pragma once

// Functions of softmax and its gradient: the elements that count, and the launch of a plan.

#include "detail/rowwise/parts.cuh"
#include "detail/rowwise/tile.cuh"
#include "short.cuh"
#include "tile.cuh"

namespace torchkiln::cuda {
namespace {

/// One bit per lane of each of a thread's items: whether the lane belongs to the row and is not
/// masked.
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

/// Computes rows that fit in the registers of a team. Row: see rows_in_parts().
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

/// Launches plans. row(tile, log, masked) returns the tag of the type for rows with adjacent
/// elements; columns(type, log) returns the kernel for other rows. kStreams: tensors that are read.
template <class T, int kStreams, class Problem, class RowType, class ColumnKernel>
struct Launcher {
  const Problem& p;
  const RowType& row;
  const ColumnKernel& columns;
  Allocate allocate;
  CUstream_st* stream;

  Status operator()(const RegistersPlan& plan) const {
    return with_tile<T>(plan.alignment, plan.rows, [&](auto tile, const TeamShape& team) {
      Grid grid;
      const Status status = make_grid(team, p.outer, grid);
      if (!status.ok()) return status;
      return with_flags(p.log, plan.masked, [&](auto log, auto masked) {
        using Tile = typename std::decay_t<decltype(tile)>::type;
        using Row = typename decltype(row(tile, log, masked))::type;
        return launch_overlapped(rows_in_registers<Row, kRowBlocks<Tile, kStreams>>, grid, stream,
                                 p, team);
      });
    });
  }

  Status operator()(const PartsPlan& plan) const {
    const auto launch = [&](auto tile, auto log, auto masked) {
      using Row = typename decltype(row(tile, log, masked))::type;
      return launch_in_parts<Row, kSoftmaxPartBlocks>(p, plan.parts, allocate, stream);
    };
    if (plan.alignment == Alignment::scalar) {
      using Tile = PartTile<T, kPartVectorsOfTwo, false>;
      return launch(TypeTag<Tile>{}, std::false_type{}, std::true_type{});
    }
    return with_flags(p.log, plan.masked, [&](auto log, auto masked) {
      constexpr int kVectors = kStreams > 1 || masked ? kPartVectorsOfTwo : kPartVectors;
      return launch(TypeTag<PartTile<T, kVectors, true>>{}, log, masked);
    });
  }

  Status operator()(const StridedPlan& plan) const {
    if (plan.blocks > kMaxGridX) return {"too many rows for one launch"};
    const Grid grid{dim3(static_cast<unsigned>(plan.blocks)),
                    dim3(kStridedColumns, static_cast<unsigned>(plan.depth))};
    return with_flags(p.log, false, [&](auto log, auto) {
      return launch_overlapped(columns(TypeTag<T>{}, log), grid, stream, p);
    });
  }

  Status operator()(const TilePlan& plan) const {
    if constexpr (std::is_same_v<Problem, Softmax>) {
      return with_flags(p.log, false,
                        [&](auto log, auto) { return launch_tiles<T, log>(p, plan, stream); });
    }
    return {"gradients have no tiles"};
  }

  Status operator()(const ShortPlan& plan) const {
    return with_flags(p.log, false, [&](auto log, auto) {
      using Row = std::conditional_t<std::is_same_v<Problem, Softmax>, ShortSoftmax<T, log>,
                                     ShortGradient<T, log>>;
      return launch_short<Row>(p, plan, stream);
    });
  }
};

template <int kStreams, class Problem, class RowType, class ColumnKernel>
Status launch_rows(const Problem& p, const RowType& row, const ColumnKernel& columns,
                   Allocate allocate, CUstream_st* stream) {
  if (p.outer * p.length * p.inner == 0) return {};
  if (p.length > kMaxColumns) return {kTooLong};
  const SoftmaxPlan plan = choose(p, alignment_of_rows(p), current_device());
  return dispatch_floating(p.dtype, [&](auto tag) {
    using T = typename std::decay_t<decltype(tag)>::type;
    return std::visit(
        Launcher<T, kStreams, Problem, RowType, ColumnKernel>{p, row, columns, allocate, stream},
        plan);
  });
}

}  // namespace
}  // namespace torchkiln::cuda
