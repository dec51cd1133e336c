#pragma once

// Gradients of gated norms in one pass: a team processes the tokens of its group one by one.
//
//   registers  grad, x, gate of a token          loaded once, as vectors
//              sums[column] += grad * ...        kept over all tokens of the team
//              sum of d * n  -- team.reduce() --> grad_x, and grad_gate if the gate is first
//
// At the end each block writes `sums` as one row of partial sums; a second kernel adds the rows.

#include "common.cuh"
#include "detail/reduce/columns.cuh"
#include "detail/rowwise/pipeline.cuh"

namespace torchkiln::cuda {
namespace {

template <class Tile>
using Weights = ColumnParameters<Compute<typename Tile::T>, Tile::kLanes, Tile::kItems>;

/// Loads weight + weight_offset of the thread's columns, or ones if there is no weight.
template <class Tile>
__device__ __forceinline__ void load_weights(const GatedNormBackward& p, int64_t group,
                                             const Tile& tile, Weights<Tile>& weights) {
  using C = Compute<typename Tile::T>;
#pragma unroll
  for (int k = 0; k < Tile::kItems; ++k) {
    C values[Tile::kLanes];
#pragma unroll
    for (int i = 0; i < Tile::kLanes; ++i) values[i] = C(1);
    if (p.weight != nullptr) {
      with_parameter_type<typename Tile::T>(p.weight_dtype, [&](auto tag) {
        using W = typename decltype(tag)::type;
        tile.load_parameters(k, static_cast<const W*>(p.weight) + group * p.columns, values);
      });
#pragma unroll
      for (int i = 0; i < Tile::kLanes; ++i) values[i] += static_cast<C>(p.weight_offset);
    }
    weights.set(k, values);
  }
}

/// Writes the sums of a block to `to`. The sums of several teams are first added in shared memory,
/// in a fixed order.
template <class Tile, class C>
__device__ __forceinline__ void write_sums(const TeamShape& shape, int team, const Tile& tile,
                                           int columns, const C (&sums)[Tile::kItems][Tile::kLanes],
                                           C* shared, C* to) {
  const bool alone = shape.per_block == 1;
  if (!alone) __syncthreads();  // all threads have read the weights
  C* const own = alone ? to : shared + team * columns;
#pragma unroll
  for (int k = 0; k < Tile::kItems; ++k)
    if (tile.has_any(k)) store(own + tile.column(k), sums[k]);
  if (alone) return;
  __syncthreads();
  for (int column = static_cast<int>(threadIdx.x); column < columns; column += blockDim.x) {
    C sum = 0;
    for (int each = 0; each < shape.per_block; ++each) sum += shared[each * columns + column];
    to[column] = sum;
  }
}

/// Computes the gradients of a team's tokens. `step`: tokens from one token of a team to its next.
template <class Tile, bool kGateFirst>
__global__ void __launch_bounds__(kGradientThreads)
    gated_norm_gradients(GatedNormBackward p, TeamShape shape, Divisor groups, int64_t step,
                         Compute<typename Tile::T>* partial) {
  using T = typename Tile::T;
  using C = Compute<T>;
  using Math = MathFor<T>;
  constexpr int kLanes = Tile::kLanes;
  constexpr int kItems = Tile::kItems;
  constexpr int kSlots = kGradientThreads / kWarpLanes;
  __shared__ TeamStorage<C, 1, kSlots> storage;
  extern __shared__ uint4 memory[];
  Team<C, 1, false, kSlots> team(shape, storage);
  const GroupBlock block(groups, team.group());
  const int columns = static_cast<int>(p.columns);
  const Tile all(p.x, columns, team.rank(), team.size());
  Weights<Tile> weights(memory, team.rank(), shape.threads);
  wait_for_previous_kernel();
  if (team.index() == 0) load_weights(p, block.group, all, weights);
  if (shape.per_block > 1) __syncthreads();

  C sums[kItems][kLanes] = {};
  for (int64_t first = block.index * shape.per_block; first < p.tokens; first += step) {
    const int64_t token = first + team.index();
    const bool inside = token < p.tokens;
    const Tile tile(p.x, inside ? columns : 0, team.rank(), team.size());
    typename Tile::Item grads[kItems], inputs[kItems], gates[kItems];
    tile.load(static_cast<const T*>(p.grad) + offset_of(p, token, block.group, p.grad_stride),
              grads);
    tile.load(static_cast<const T*>(p.x) + offset_of(p, token, block.group, p.x_stride), inputs);
    tile.load(static_cast<const T*>(p.gate) + offset_of(p, token, block.group, p.gate_stride),
              gates);
    const C rstd = inside ? static_cast<const C*>(p.rstd)[token * p.groups + block.group] : C(0);
    const int64_t result = offset_of(p, token, block.group, p.groups * p.columns);
    T* const grad_x = static_cast<T*>(p.grad_x) + result;
    T* const grad_gate = static_cast<T*>(p.grad_gate) + result;

    // The gradients of the normalized elements. If the gate comes first they are computed again
    // after the reduction: in registers, silu and its derivative take more space than the inputs.
    C gradient[kItems][kLanes];
    C dot[1] = {};
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      C g[kLanes], x[kLanes], gate[kLanes], weight[kLanes];
      widen(grads[k], g);
      widen(inputs[k], x);
      widen(gates[k], gate);
      weights.read(k, weight);
#pragma unroll
      for (int i = 0; i < kLanes; ++i) {
        const Slope<C> silu = silu_and_slope<Math>(gate[i]);
        if constexpr (kGateFirst) {
          dot[0] += g[i] * weight[i] * (x[i] * silu.value);
        } else {
          const C n = x[i] * rstd;
          const C passed = g[i] * silu.value;
          sums[k][i] += passed * n;
          gradient[k][i] = passed * weight[i];
          dot[0] += gradient[k][i] * x[i];
          gate[i] = g[i] * n * (weight[i] * silu.slope);
        }
      }
      if constexpr (!kGateFirst) tile.save(inside && p.grad_gate != nullptr, grad_gate, k, gate);
    }
    team.reduce(dot, Sum{});
    // The mean of gradient * n, times rstd.
    const C pull = dot[0] * rstd / static_cast<C>(p.columns) * rstd;
    force_reconversion(inputs);
    if constexpr (kGateFirst) {
      force_reconversion(grads);
      force_reconversion(gates);
    }
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      C x[kLanes], results[kLanes];
      widen(inputs[k], x);
      if constexpr (kGateFirst) {
        C g[kLanes], gate[kLanes], weight[kLanes];
        widen(grads[k], g);
        widen(gates[k], gate);
        weights.read(k, weight);
#pragma unroll
        for (int i = 0; i < kLanes; ++i) {
          const Slope<C> silu = silu_and_slope<Math>(gate[i]);
          const C z = x[i] * silu.value;
          sums[k][i] += g[i] * rstd * z;
          const C of_z = (g[i] * weight[i] - z * pull) * rstd;
          results[i] = of_z * silu.value;
          gate[i] = of_z * x[i] * silu.slope;
        }
        tile.save(inside && p.grad_gate != nullptr, grad_gate, k, gate);
      } else {
#pragma unroll
        for (int i = 0; i < kLanes; ++i) results[i] = (gradient[k][i] - x[i] * pull) * rstd;
      }
      tile.save(inside && p.grad_x != nullptr, grad_x, k, results);
    }
  }
  if (p.grad_weight == nullptr) return;
  write_sums(shape, team.index(), all, columns, sums, reinterpret_cast<C*>(memory),
             partial + offset_of(p, block.index, block.group, p.groups * p.columns));
}

template <class Tile, bool kGateFirst>
Status launch_gradients(const GatedNormBackward& p, const GatedGradientPlan& plan,
                        Allocate allocate, CUstream_st* stream) {
  using C = Compute<typename Tile::T>;
  if (plan.chunks * p.groups > kMaxGridX) return {"too many rows for one launch"};
  const int64_t elements = p.groups * p.columns;
  const size_t sums = p.grad_weight == nullptr ? 0 : static_cast<size_t>(plan.chunks * elements);
  C* const partial = static_cast<C*>(allocate(sums * sizeof(C)));
  const Grid grid{dim3(static_cast<unsigned>(plan.chunks * p.groups)),
                  dim3(static_cast<unsigned>(plan.team.block_threads())), 1, plan.shared_bytes};
  const Status status = launch_overlapped(gated_norm_gradients<Tile, kGateFirst>, grid, stream, p,
                                          plan.team, Divisor(static_cast<uint32_t>(p.groups)),
                                          plan.chunks * plan.team.per_block, partial);
  if (!status.ok() || p.grad_weight == nullptr) return status;
  const reduce::columns::Plan columns{1, 1, 1, plan.chunks, p.tokens, elements};
  const reduce::Result weight{p.grad_weight, p.weight_dtype, 1};
  return reduce::columns::queue_finish(static_cast<const C*>(partial), columns, weight, nullptr,
                                       stream);
}

}  // namespace

template <class T>
Status GatedNormBackwardByDtype<T>::launch(const GatedNormBackward& p,
                                           const GatedGradientPlan& plan, Allocate allocate,
                                           CUstream_st* stream) {
  const auto launch = [&](auto tag) {
    using Tile = typename decltype(tag)::type;
    return p.gate_first ? launch_gradients<Tile, true>(p, plan, allocate, stream)
                        : launch_gradients<Tile, false>(p, plan, allocate, stream);
  };
  return plan.alignment == Alignment::vector
             ? launch(TypeTag<RowTile<RowVectors<T, kVectorLanes<T>, true>, kFewItems>>{})
             : launch(TypeTag<RowTile<RowVectors<T, 1, true>, kScalarItems>>{});
}

}  // namespace torchkiln::cuda
