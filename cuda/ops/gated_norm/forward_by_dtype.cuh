#pragma once

// Forward pass of gated norms: a team reads a group of x and of the gate into registers, sums the
// squares, and writes the result.

#include "common.cuh"

namespace torchkiln::cuda {
namespace {

/// The result is x * silu(gate), times rstd and the weight, whether or not p.gate_first. Only the
/// squares for rstd differ: of x * silu(gate) with p.gate_first, otherwise of x. W: the type of the
/// weight.
template <class Tile, class W>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks<Tile, 2>)
    gated_norm_rows(GatedNorm p, TeamShape shape, Divisor groups) {
  using T = typename Tile::T;
  using C = Compute<T>;
  constexpr int kLanes = Tile::kLanes;
  constexpr int kItems = Tile::kItems;
  __shared__ TeamStorage<C, 1> storage;
  wait_for_previous_kernel();
  Team<C, 1> team(shape, storage);
  const GroupBlock block(groups, team.group());
  const int64_t token = block.index * shape.per_block + team.index();
  const bool inside = token < p.tokens;
  const T* x = static_cast<const T*>(p.x) + offset_of(p, token, block.group, p.x_stride);
  const T* gate = static_cast<const T*>(p.gate) + offset_of(p, token, block.group, p.gate_stride);
  const Tile tile(x, inside ? static_cast<int>(p.columns) : 0, team.rank(), team.size());
  typename Tile::Item inputs[kItems], gates[kItems];
  tile.load(x, inputs);
  tile.load(gate, gates);
  team.init_barriers();

  C products[kItems][kLanes] = {};
  C squares[1] = {};
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    C from[kLanes], through[kLanes];
    widen(inputs[k], from);
    widen(gates[k], through);
#pragma unroll
    for (int i = 0; i < Tile::lanes(k); ++i) {
      products[k][i] = from[i] * Silu::value<MathFor<T>>(through[i]);
      const C normalized = p.gate_first ? products[k][i] : from[i];
      squares[0] += normalized * normalized;
    }
  }
  team.reduce(squares, Sum{});
  const C rstd = rsqrt(squares[0] / static_cast<C>(p.columns) + static_cast<C>(p.eps));
  if (inside && team.rank() == 0 && p.rstd != nullptr)
    static_cast<C*>(p.rstd)[token * p.groups + block.group] = rstd;
  const W* weights = static_cast<const W*>(p.weight) + block.group * p.columns;
  T* y = static_cast<T*>(p.y) + offset_of(p, token, block.group, p.groups * p.columns);
  // Two loops: with one loop and a branch in each step, a thread needs one register more than two
  // blocks per SM allow.
  if (p.weight == nullptr) {
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
#pragma unroll
      for (int i = 0; i < Tile::lanes(k); ++i) products[k][i] *= rstd;
      tile.save(inside, y, k, products[k]);
    }
    return;
  }
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    C weight[kLanes];
    tile.load_parameters(k, weights, weight);
#pragma unroll
    for (int i = 0; i < Tile::lanes(k); ++i)
      products[k][i] = products[k][i] * rstd * (weight[i] + static_cast<C>(p.weight_offset));
    tile.save(inside, y, k, products[k]);
  }
}

}  // namespace

template <class T>
Status GatedNormForwardByDtype<T>::launch(const GatedNorm& p, const GatedNormPlan& plan,
                                          CUstream_st* stream) {
  return with_tile<T>(plan.alignment, plan.rows, [&](auto tag, const TeamShape& team) {
    using Tile = typename decltype(tag)::type;
    Grid grid;
    const int64_t blocks = ceil_div(p.tokens, team.per_block) * p.groups;
    const Status status = make_grid(team, blocks * team.per_block, grid);
    if (!status.ok()) return status;
    return with_parameter_type<T>(p.weight_dtype, [&](auto parameter) {
      return launch_overlapped(gated_norm_rows<Tile, typename decltype(parameter)::type>, grid,
                               stream, p, team, Divisor(static_cast<uint32_t>(p.groups)));
    });
  });
}

}  // namespace torchkiln::cuda
