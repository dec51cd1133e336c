#pragma once

#include "forward_one_pass.cuh"
#include "forward_split.cuh"

namespace torchkiln::cuda {

using namespace device;
using namespace rowwise;
namespace {

template <class Tile, class W>
Status launch_one_pass(const Norm& p, const TeamShape& team, CUstream_st* stream) {
  Grid grid;
  const Status status = make_grid(team, p.rows, grid);
  if (!status.ok()) return status;
  return p.centered ? launch_overlapped(norm_rows<Tile, W, true>, grid, stream, p, team)
                    : launch_overlapped(norm_rows<Tile, W, false>, grid, stream, p, team);
}

}  // namespace

/// Half precision is compiled in files of its own, to keep each below 15 s.
template <class T>
Status norm_rows_of(const Norm& p, Alignment alignment, Allocate allocate, CUstream_st* stream) {
  const bool lacks_parameters = p.weight == nullptr || (p.centered && p.bias == nullptr);
  const auto in_registers = [&](auto tag, const TeamShape& team) {
    using Tile = typename decltype(tag)::type;
    if (lacks_parameters) return launch_one_pass<Tile, void>(p, team, stream);
    return with_parameter_type<T>(p.weight_dtype, [&](auto parameter) {
      return launch_one_pass<Tile, typename decltype(parameter)::type>(p, team, stream);
    });
  };
  const auto too_long = [&] { return split_norm(p, alignment, allocate, stream); };
  // A thread that holds eight vectors of two rows, or of float32 and its parameters, spills. With
  // four, a long row takes a cluster, which also gives few rows more SMs.
  const bool is_few = p.rows < current_device().multiprocessors;
  const bool is_large =
      alignment != Alignment::scalar && (p.residual != nullptr || sizeof(T) == 4 || is_few);
  return with_tile<T>(alignment, p.columns, is_large ? 2 : 1, kRowThreads, in_registers, too_long);
}

}  // namespace torchkiln::cuda
