#pragma once

// Forward pass of rows that are longer than the registers of a cluster: each step reads them again.

#include "forward_common.cuh"

namespace torchkiln::cuda {

using namespace device;
using namespace rowwise;
namespace {

template <class Access>
__global__ void __launch_bounds__(kRowThreads) norm_streamed_rows(Norm p, TeamShape shape) {
  using T = typename Access::T;
  using C = Compute<T>;
  using Item = typename Access::Item;
  constexpr int kLanes = Access::kLanes;
  __shared__ TeamStorage<C, 2> storage;
  wait_for_previous_kernel();
  Team<C, 2> team(shape, storage);
  const int64_t row = team.first_team() + team.index();
  const bool inside = row < p.rows;
  const T* x = static_cast<const T*>(p.x) + row * p.x_row_stride;
  T* sum = static_cast<T*>(p.sum) + row * p.columns;
  T* y = static_cast<T*>(p.y) + row * p.columns;
  const Access access(x, inside ? static_cast<int>(p.columns) : 0);

  const auto load = [&](int vector) {
    const int column = access.column(vector);
    Item item = access.load(x, column);
    if (p.residual == nullptr) return item;
    with_residual<T>(p, row, [&](auto* residual) {
      C other[kLanes];
      if constexpr (std::is_same_v<decltype(residual), const T*>) {
        widen(access.load(residual, column), other);
      } else {
        access.load_parameters(column, residual, other);
      }
#pragma unroll
      for (int i = 0; i < kLanes; ++i)
        item.lane[i] = convert<T>(convert<C>(item.lane[i]) + other[i]);
    });
    return item;
  };
  const RowPasses<kFewItems, decltype(load)> passes(load, team.rank(), team.size(),
                                                    inside ? access.vectors() : 0);
  team.init_barriers();
  const C count = static_cast<C>(p.columns);
  C mean = 0;
  if (p.centered) {
    C total[1] = {};
    passes.each([&](const Item& item, int) {
#pragma unroll
      for (int i = 0; i < kLanes; ++i) total[0] += convert<C>(item.lane[i]);
    });
    team.reduce(total, Sum{});
    mean = total[0] / count;
  }
  C moments[2] = {};
  passes.each([&](const Item& item, int vector) {
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      if (!access.has(access.column(vector), i)) continue;
      const C from_mean = convert<C>(item.lane[i]) - mean;
      moments[0] += from_mean * from_mean;
      moments[1] += from_mean;
    }
  });
  team.reduce(moments, Sum{});
  const C remainder = p.centered ? moments[1] / count : C(0);
  const C rstd = rsqrt(moments[0] / count - remainder * remainder + static_cast<C>(p.eps));
  if (inside && team.rank() == 0) {
    if (p.mean != nullptr) static_cast<C*>(p.mean)[row] = mean + remainder;
    if (p.rstd != nullptr) static_cast<C*>(p.rstd)[row] = rstd;
  }
  passes.each([&](const Item& item, int vector) {
    const int column = access.column(vector);
    C weight[kLanes], bias[kLanes], result[kLanes];
    load_affine(p, access, column, weight, bias);
#pragma unroll
    for (int i = 0; i < kLanes; ++i)
      result[i] = (convert<C>(item.lane[i]) - mean - remainder) * rstd;
    round_normalized<T>(p, result);
#pragma unroll
    for (int i = 0; i < kLanes; ++i) result[i] = result[i] * weight[i] + bias[i];
    access.save(y, column, result);
    if (p.residual != nullptr) {
#pragma unroll
      for (int i = 0; i < kLanes; ++i) result[i] = convert<C>(item.lane[i]);
      access.save(sum, column, result);
    }
  });
}

}  // namespace
}  // namespace torchkiln::cuda
