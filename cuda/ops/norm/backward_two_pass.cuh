#pragma once

// Gradients of norms for rows that cannot be streamed: their offsets differ between tensors, or
// they are longer than a cluster holds.

#include "backward_common.cuh"
#include "detail/reduce/columns.cuh"
#include "torchkiln/kernels/reduction.h"

namespace torchkiln::cuda::norm_gradients {

using namespace reduce;
namespace {

/// The sums of d * n and of d over each row, which its gradient needs.
template <class Access>
__global__ void __launch_bounds__(kRowThreads)
    row_sums(NormBackward p, TeamShape shape, Compute<typename Access::T>* out) {
  using T = typename Access::T;
  using C = Compute<T>;
  constexpr int kLanes = Access::kLanes;
  __shared__ TeamStorage<C, 2> storage;
  wait_for_previous_kernel();
  Team<C, 2> team(shape, storage);
  const int64_t row = team.first_team() + team.index();
  const bool inside = row < p.rows;
  const T* grad = static_cast<const T*>(p.grad) + row * p.grad_row_stride;
  const T* z = static_cast<const T*>(p.z) + row * p.z_row_stride;
  const Access access(grad, inside ? static_cast<int>(p.columns) : 0);
  const C mean = inside && p.centered ? static_cast<const C*>(p.mean)[row] : C(0);
  const C rstd = inside ? static_cast<const C*>(p.rstd)[row] : C(0);

  struct Pair {
    typename Access::Item grad, z;
  };
  const auto load = [&](int vector) {
    const int column = access.column(vector);
    return Pair{access.load(grad, column), access.load(z, column)};
  };
  const RowPasses<kFewItems, decltype(load)> pass(load, team.rank(), team.size(),
                                                  inside ? access.vectors() : 0);
  team.init_barriers();
  C sums[2] = {};
  pass.each([&](const Pair& item, int vector) {
    C weight[kLanes];
    load_any_weight(p, access, access.column(vector), weight);
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      if (!access.has(access.column(vector), i)) continue;
      const C d = convert<C>(item.grad.lane[i]) * weight[i];
      sums[0] += d * (convert<C>(item.z.lane[i]) - mean) * rstd;
      sums[1] += d;
    }
  });
  team.reduce(sums, Sum{});
  if (!inside || team.rank() > 0) return;
  out[2 * row] = sums[0];
  out[2 * row + 1] = sums[1];
}

/// Column body: grad_x and the sum of grad * n, once the sums over the rows are known.
template <class T>
struct RowSumsBody {
  using C = Compute<T>;
  static constexpr int kLanes = 1;
  static constexpr int kRowsInFlight = 8;

  struct Item {
    T grad, grad_sum, z;
  };

  NormBackward p;
  const C* sums;
  C weight;

  __device__ __forceinline__ void begin(int64_t column, bool, C (&)[1]) {
    weight = C(1);
    if (p.weight == nullptr) return;
    with_parameter_type<T>(p.weight_dtype, [&](auto tag) {
      using W = typename decltype(tag)::type;
      weight = convert<C>(static_cast<const W*>(p.weight)[column]);
    });
    weight += static_cast<C>(p.weight_offset);
  }

  __device__ __forceinline__ Item load(int64_t row, int64_t column) const {
    Item item{};
    item.grad = static_cast<const T*>(p.grad)[row * p.grad_row_stride + column];
    item.z = static_cast<const T*>(p.z)[row * p.z_row_stride + column];
    if (p.grad_sum != nullptr)
      item.grad_sum = static_cast<const T*>(p.grad_sum)[row * p.grad_sum_row_stride + column];
    return item;
  }

  __device__ __forceinline__ void consume(const Item& item, int64_t row, int64_t column,
                                          C (&sum)[1]) const {
    const C mean = p.centered ? static_cast<const C*>(p.mean)[row] : C(0);
    const C rstd = static_cast<const C*>(p.rstd)[row];
    const C grad = convert<C>(item.grad);
    const C n = (convert<C>(item.z) - mean) * rstd;
    sum[0] += grad * n;
    if (p.grad_x == nullptr) return;
    const C inverse_columns = C(1) / static_cast<C>(p.columns);
    const C level = p.centered ? sums[2 * row + 1] * inverse_columns : C(0);
    const C scale = p.centered ? factor_of_gradient<true>(p, rstd) : rstd;
    C result = (grad * weight - level - n * (sums[2 * row] * inverse_columns)) * scale;
    if (p.grad_sum != nullptr) result += convert<C>(item.grad_sum);
    static_cast<T*>(p.grad_x)[row * p.columns + column] = convert<T>(result);
  }
};

Reduction bias_of(const NormBackward& p) {
  Reduction bias{};
  bias.in = p.grad;
  bias.out = p.grad_bias;
  bias.dtype = p.dtype;
  bias.out_dtype = p.weight_dtype;
  bias.outer = 1;
  bias.reduced = p.rows;
  bias.inner = p.columns;
  bias.reduced_stride = p.grad_row_stride;
  bias.inner_stride = 1;
  bias.divisor = 1;
  return bias;
}

/// Three kernels: the sums over each row, then grad_x with the sums of grad * n over the columns,
/// then those of grad for the bias.
template <class Access>
Status launch_two_pass(const NormBackward& p, Allocate allocate, CUstream_st* stream) {
  using T = typename Access::T;
  using C = Compute<T>;
  C* sums = static_cast<C*>(allocate(static_cast<size_t>(2 * p.rows) * sizeof(C)));
  const int64_t vectors = ceil_div(p.columns, Access::kLanes) + 1;
  const int max_blocks = current_device().runs_90_code ? kMaxClusterBlocks : 1;
  const int64_t threads = ceil_div(vectors, kItems);
  constexpr int kSmallBlock = 128;  // block size of teams that share a block
  const TeamShape team =
      make_team(threads, kRowThreads, threads <= kWarpLanes ? kSmallBlock : 0, max_blocks);
  Grid grid;
  Status status = make_grid(team, p.rows, grid);
  if (!status.ok()) return status;
  status = launch_overlapped(row_sums<Access>, grid, stream, p, team, sums);
  if (!status.ok()) return status;
  void* grad_weight = p.grad_weight;
  if (grad_weight == nullptr)
    grad_weight = allocate(static_cast<size_t>(p.columns) * size_of(p.weight_dtype));
  const RowSumsBody<T> body{p, sums, C(1)};
  status = columns::launch(body, columns::make_plan(p.rows, p.columns, 1), allocate, grad_weight,
                           p.weight_dtype, stream);
  if (!status.ok() || p.grad_bias == nullptr) return status;
  return reduce(bias_of(p), allocate, stream);
}

Status two_pass(const NormBackward& p, Alignment alignment, Allocate allocate,
                CUstream_st* stream) {
  return dispatch_floating(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (alignment == Alignment::vector)
      return launch_two_pass<RowVectors<T, kVectorLanes<T>, true>>(p, allocate, stream);
    // Rows with an offset are read element by element, whether or not they share it.
    return launch_two_pass<RowVectors<T, 1, true>>(p, allocate, stream);
  });
}

}  // namespace
}  // namespace torchkiln::cuda::norm_gradients
