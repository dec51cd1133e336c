#include "torchkiln/kernels/norm.h"

#include "torchkiln/row.cuh"

namespace torchkiln::cuda {
namespace {

/// What an element is multiplied by once it is normalized, and what is added to that.
template <class W, class Access, class C, int kLanes>
__device__ __forceinline__ void load_affine(const Norm& p, const Access& access, int column,
                                            C (&weight)[kLanes], C (&bias)[kLanes]) {
#pragma unroll
  for (int i = 0; i < kLanes; ++i) {
    weight[i] = C(1);
    bias[i] = C(0);
  }
  if (p.weight != nullptr) {
    access.load_parameters(static_cast<const W*>(p.weight), column, weight);
#pragma unroll
    for (int i = 0; i < kLanes; ++i) weight[i] += static_cast<C>(p.weight_offset);
  }
  if (p.bias != nullptr) access.load_parameters(static_cast<const W*>(p.bias), column, bias);
}

/// A team reads a row and, with all of it in registers, finds its mean and spread and writes it.
/// kAffine: there is a weight and, for layer norm, a bias.
template <class Place, class W, bool kCentered, bool kAffine>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks<Place>)
    norm_rows(Norm p, TeamShape shape) {
  using T = typename Place::T;
  using C = Compute<T>;
  constexpr int kLanes = Place::kLanes;
  constexpr int kItems = Place::kItems;
  constexpr int kTold = kCentered ? (sizeof(T) > 2 ? 4 : 3) : 1;
  __shared__ Meeting<C, kTold> meeting;
  wait_for_previous_kernel();
  Team<C, kTold> team(shape, meeting);
  const int64_t row = team.first() + team.index();
  const bool inside = row < p.rows;
  const T* x = static_cast<const T*>(p.x) + row * p.x_row_stride;
  const typename Place::Access access(x, inside ? static_cast<int>(p.columns) : 0);
  const Place place(access, team.rank(), team.size());
  typename Place::Item items[kItems];
  place.load(x, items);
  if (p.residual != nullptr) {
    typename Place::Item others[kItems];
    place.load(static_cast<const T*>(p.residual) + row * p.residual_row_stride, others);
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      C both[kLanes], other[kLanes];
      widen(items[k], both);
      widen(others[k], other);
#pragma unroll
      for (int i = 0; i < kLanes; ++i) {
        both[i] += other[i];
        items[k].lane[i] = convert<T>(both[i]);
      }
      place.save(inside, static_cast<T*>(p.sum) + row * p.columns, k, both);
    }
  }

  team.open();

  // Each warp has the sum of squares around a mean of its own, and adds how far that is from the
  // mean of all: the warps meet once, and no digits are lost to a large mean.
  const C share = C(1) / static_cast<C>(p.columns);
  C count = 0, center = 0;
  if constexpr (kCentered) {
    C total[1] = {};
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      C z[kLanes];
      widen(items[k], z);
#pragma unroll
      for (int i = 0; i < kLanes; ++i) total[0] += z[i];
    }
    widen_anew(items);
    team.combine_in_warp(total, Add{});
    const int lanes = min(team.size(), kWarpLanes);
    count = static_cast<C>(place.count_of_lanes(team.rank() & (lanes - 1), lanes));
    center = count > 0 ? total[0] / count : C(0);
  }
  // What is left of a mean after it was rounded matters to the digits of float32 alone.
  constexpr bool kCorrects = kCentered && sizeof(T) > 2;
  C around[kCorrects ? 2 : 1] = {};
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    C z[kLanes];
    widen(items[k], z);
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      const C distance = !kCentered || place.has(k, i) ? z[i] - center : C(0);
      around[0] += distance * distance;
      if constexpr (kCorrects) around[1] += distance;
    }
  }
  widen_anew(items);
  team.combine_in_warp(around, Add{});
  C mean = 0;
  C moments[kCorrects ? 2 : 1];
  if constexpr (kCentered) {
    C told[kTold] = {count, center, around[0]};
    if constexpr (kCorrects) told[3] = around[1];
    using Told = const C(&)[kTold];
    team.tell(told);
    C total[1];
    team.combine_told(told, total, Add{}, [](Told of, C(&to)[1]) { to[0] = of[0] * of[1]; });
    mean = total[0] * share;
    team.combine_told(told, moments, Add{}, [mean](Told of, auto& to) {
      const C distance = of[1] - mean;
      to[0] = of[2] + of[0] * distance * distance;
      if constexpr (kCorrects) {
        to[0] += C(2) * distance * of[3];
        to[1] = of[3] + of[0] * distance;
      }
    });
  } else {
    moments[0] = around[0];
    team.combine_warps(moments, Add{});
  }
  const C rest = kCorrects ? moments[kCorrects ? 1 : 0] * share : C(0);
  const C rstd = rsqrt(moments[0] * share - rest * rest + static_cast<C>(p.eps));
  if (inside && team.rank() == 0) {
    if (kCentered && p.mean != nullptr) static_cast<C*>(p.mean)[row] = mean + rest;
    if (p.rstd != nullptr) static_cast<C*>(p.rstd)[row] = rstd;
  }
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    C z[kLanes], weight[kLanes], bias[kLanes];
    widen(items[k], z);
    // Without a branch, behind which everything would wait: of no item, those of the first column.
    const int column = place.has_any(k) || !Place::Access::kWhole ? place.column(k) : 0;
    if constexpr (kAffine) {
      access.load_parameters(static_cast<const W*>(p.weight), column, weight);
      if constexpr (kCentered) access.load_parameters(static_cast<const W*>(p.bias), column, bias);
    } else {
      load_affine<W>(p, access, column, weight, bias);
    }
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      if constexpr (kAffine && !kCentered) weight[i] += static_cast<C>(p.weight_offset);
      if constexpr (kCentered) z[i] -= mean;
      if constexpr (kCorrects) z[i] -= rest;
      z[i] *= rstd * weight[i];
      if constexpr (kCentered) z[i] += bias[i];
    }
    place.save(inside, static_cast<T*>(p.y) + row * p.columns, k, z);
  }
}

/// Rows that are longer than the registers of a cluster: each step reads them again.
template <class Access, class W>
__global__ void __launch_bounds__(kRowThreads) norm_long_rows(Norm p, TeamShape shape) {
  using T = typename Access::T;
  using C = Compute<T>;
  using Item = typename Access::Item;
  constexpr int kLanes = Access::kLanes;
  __shared__ Meeting<C, 2> meeting;
  wait_for_previous_kernel();
  Team<C, 2> team(shape, meeting);
  const int64_t row = team.first() + team.index();
  const bool inside = row < p.rows;
  const T* x = static_cast<const T*>(p.x) + row * p.x_row_stride;
  const T* residual = static_cast<const T*>(p.residual) + row * p.residual_row_stride;
  T* sum = static_cast<T*>(p.sum) + row * p.columns;
  T* y = static_cast<T*>(p.y) + row * p.columns;
  const Access access(x, inside ? static_cast<int>(p.columns) : 0);

  const auto load = [&](int vector) {
    const int column = access.column(vector);
    Item item = access.load(x, column);
    if (p.residual == nullptr) return item;
    const Item other = access.load(residual, column);
#pragma unroll
    for (int i = 0; i < kLanes; ++i)
      item.lane[i] = convert<T>(convert<C>(item.lane[i]) + convert<C>(other.lane[i]));
    return item;
  };
  const RowPasses<kFewItems, decltype(load)> passes(load, team.rank(), team.size(),
                                                    inside ? access.vectors() : 0);
  team.open();
  const C count = static_cast<C>(p.columns);
  C mean = 0;
  if (p.centered) {
    C total[1] = {};
    passes.each([&](const Item& item, int) {
#pragma unroll
      for (int i = 0; i < kLanes; ++i) total[0] += convert<C>(item.lane[i]);
    });
    team.combine(total, Add{});
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
  team.combine(moments, Add{});
  const C rest = p.centered ? moments[1] / count : C(0);
  const C rstd = rsqrt(moments[0] / count - rest * rest + static_cast<C>(p.eps));
  if (inside && team.rank() == 0) {
    if (p.mean != nullptr) static_cast<C*>(p.mean)[row] = mean + rest;
    if (p.rstd != nullptr) static_cast<C*>(p.rstd)[row] = rstd;
  }
  passes.each([&](const Item& item, int vector) {
    const int column = access.column(vector);
    C weight[kLanes], bias[kLanes], result[kLanes];
    load_affine<W>(p, access, column, weight, bias);
#pragma unroll
    for (int i = 0; i < kLanes; ++i)
      result[i] = (convert<C>(item.lane[i]) - mean - rest) * rstd * weight[i] + bias[i];
    access.save(y, column, result);
    if (p.residual != nullptr) {
#pragma unroll
      for (int i = 0; i < kLanes; ++i) result[i] = convert<C>(item.lane[i]);
      access.save(sum, column, result);
    }
  });
}

template <class Access, class W>
Status run(const Norm& p, CUstream_st* stream) {
  const int64_t vectors = ceil_div(p.columns, Access::kLanes) + (Access::kWhole ? 0 : 1);
  const RowPlan plan = make_row_plan(vectors, 1);
  Grid grid;
  const Status status = make_grid(plan.team, p.rows, grid);
  if (!status.ok()) return status;
  return with_items(plan, [&](auto items) {
    if constexpr (items == 0) {
      return launch_overlapped(norm_long_rows<Access, W>, grid, stream, p, plan.team);
    } else {
      using Place = RowPlace<Access, items>;
      const auto start = [&](auto centered, auto affine) {
        return launch_overlapped(norm_rows<Place, W, centered, affine>, grid, stream, p, plan.team);
      };
      const bool affine = p.weight != nullptr && (p.bias != nullptr || !p.centered);
      if (p.centered) {
        return affine ? start(std::true_type{}, std::true_type{})
                      : start(std::true_type{}, std::false_type{});
      }
      return affine ? start(std::false_type{}, std::true_type{})
                    : start(std::false_type{}, std::false_type{});
    }
  });
}

}  // namespace

Status norm(const Norm& p, CUstream_st* stream) {
  if (p.rows == 0 || p.columns == 0) return {};
  if (p.columns > kMostColumns) return {kTooLong};
  const RowsOf tensors[] = {{p.x, p.x_row_stride},
                            {p.residual, p.residual_row_stride},
                            {p.sum, p.columns},
                            {p.y, p.columns}};
  RowKind kind = kind_of(tensors, p.dtype, p.rows, p.columns);
  const bool whole_parameters = aligned(p.weight, kVectorBytes) && aligned(p.bias, kVectorBytes);
  if (kind == RowKind::whole && !whole_parameters) kind = RowKind::alike;
  return dispatch_floating(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return with_access<T>(kind, [&](auto access) {
      using Access = typename decltype(access)::type;
      // float32 parameters stand beside half precision alone.
      if constexpr (sizeof(T) == 2) {
        if (p.weight_dtype != p.dtype) return run<Access, float>(p, stream);
      }
      return run<Access, T>(p, stream);
    });
  });
}

}  // namespace torchkiln::cuda
