#pragma once

// Gradients of norms, for rows with the same offset in all tensors. Every element is read once: a
// team processes rows one by one, and a thread has the same columns in each row.
//
//   shared     |  stage 0: row i  | stage 1: row i+s | stage 2: row i+2s|   s: number of teams
//   memory     |  grad, z         | in flight        | in flight        |
//                       |
//   registers  n = (z - mean) * rstd, d = grad * weight
//              weight_sum[column] += grad * n, bias_sum[column] += grad    kept over all rows
//              sums of d * n and of d over the row  -- team.reduce() -->   grad_x of row i
//
// At the end weight_sum and bias_sum are written as one row of partial sums per block or cluster,
// which a second kernel adds.

#include "backward_common.cuh"
#include "backward_finish.cuh"
#include "detail/rowwise/pipeline.cuh"

namespace torchkiln::cuda::norm_gradients {

namespace {

template <class Access>
using Parameters = ColumnParameters<Compute<typename Access::T>, Access::kLanes, kItems>;

/// Computes the gradients. The rows of all teams of a block or cluster are a multiple of the
/// vector's lanes apart, so all have the same offset from a 16-byte boundary: the column sums and
/// parameters of a thread belong to the same columns in every row.
template <class Access, bool kCentered, bool kAdds, int kStages>
__global__ void __launch_bounds__(kThreads)
    stream_rows(NormBackward p, TeamShape shape, Compute<typename Access::T>* partial) {
  using T = typename Access::T;
  using C = Compute<T>;
  constexpr int kLanes = Access::kLanes;
  constexpr int kSlots = kStages == 3 ? kMaxWarps : kLargeClusterWarps;
  __shared__ TeamStorage<C, 2, kSlots> storage;
  extern __shared__ uint4 memory[];
  Team<C, 2, true, kSlots> team(shape, storage);
  // The teams of a block share the parameters of its columns in shared memory. So the first rows of
  // the teams, team.groups() rows apart, must have the same offset from a 16-byte boundary.
  const int64_t base = team.group();
  const int64_t step = team.teams();
  int64_t row = base + team.index() * team.groups();
  const T* grad = static_cast<const T*>(p.grad);
  const T* grad_sum = static_cast<const T*>(p.grad_sum);
  const T* z = static_cast<const T*>(p.z);
  const Access access(grad + row * p.grad_row_stride, static_cast<int>(p.columns));
  using Pipeline = RowPipeline<Access, kItems, 2, kStages, kThreads>;
  Pipeline rows(memory, access, team.rank(), team.size());
  Parameters<Access> weights(reinterpret_cast<unsigned char*>(memory) + Pipeline::kBytes,
                             team.rank_in_block(), shape.threads);
  wait_for_previous_kernel();

  rows.start(0, grad + row * p.grad_row_stride, p.grad_row_stride, step);
  rows.start(1, z + row * p.z_row_stride, p.z_row_stride, step);
  if constexpr (kAdds) rows.add_stride(p.grad_sum_row_stride);
#pragma unroll
  for (int ahead = 0; ahead + 1 < kStages; ++ahead) rows.fetch(row + ahead * step, p.rows);
  team.init_barriers();
  if (team.index() == 0) {
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      C values[kLanes] = {};
      if (rows.has_any(k)) load_any_weight(p, access, rows.column(k), values);
      weights.set(k, values);
    }
  }
  if (shape.per_block > 1) __syncthreads();

  C weight_sum[kItems][kLanes] = {};
  C bias_sum[kCentered ? kItems : 1][kLanes] = {};
  const C* means = static_cast<const C*>(p.mean);
  const C* rstds = static_cast<const C*>(p.rstd);
  C next_mean = kCentered && row < p.rows ? means[row] : C(0);
  C next_rstd = row < p.rows ? rstds[row] : C(0);
  const C inverse_columns = C(1) / static_cast<C>(p.columns);

  for (int64_t first = base; first < p.rows; first += step, row += step) {
    const bool inside = row < p.rows;
    rows.fetch(row + (kStages - 1) * step, p.rows);
    const C mean = next_mean;
    const C rstd = next_rstd;
    if (row + step < p.rows) {
      if constexpr (kCentered) next_mean = means[row + step];
      next_rstd = rstds[row + step];
    }
    if constexpr (kAdds) {
      if (inside) rows.prefetch(grad_sum + row * p.grad_sum_row_stride);
    }
    rows.wait();

    C sums[kCentered ? 2 : 1] = {};
    if (inside) {
#pragma unroll
      for (int k = 0; k < kItems; ++k) {
        C g[kLanes], z[kLanes], weight[kLanes];
        rows.read(0, k, g);
        rows.read(1, k, z);
        weights.read(k, weight);
        accumulate<kCentered>(g, z, weight, mean, rstd, weight_sum[k], bias_sum[kCentered ? k : 0],
                              sums);
      }
    }
    if (p.grad_x != nullptr) {
      team.reduce(sums, Sum{});
      const Projection<C> projection =
          projection_of<kCentered>(p, mean, rstd, inverse_columns, sums);
      T* grad_x = static_cast<T*>(p.grad_x) + row * p.columns;
      typename Access::Item others[kItems];
      const bool can_overread = rows.can_overread(row, p.rows);
      if constexpr (kAdds) {
        if (inside) rows.load(grad_sum + row * p.grad_sum_row_stride, can_overread, others);
      }
#pragma unroll
      for (int k = 0; k < kItems; ++k) {
        C g[kLanes], z[kLanes], weight[kLanes];
        rows.read(0, k, g);
        rows.read(1, k, z);
        weights.read(k, weight);
        project<T>(projection, z, weight, g);
        if constexpr (kAdds) {
          if (inside)
            rows.complete(grad_sum + row * p.grad_sum_row_stride, can_overread, k, others[k]);
          C other[kLanes];
          widen(others[k], other);
          add_lanes(other, g);
        }
        rows.save(inside, grad_x, k, g);
      }
      rows.save_partials(inside, grad_x);
    }
    rows.advance();
  }

  // Each block or cluster stores one row of partial sums.
  const int teams_per_block = shape.per_block;
  const int64_t chunk = team.group();
  const int64_t chunks = team.groups();
  const auto store_partial = [&](const auto& own_sums, C* to) {
    C* shared = reinterpret_cast<C*>(memory);
    if (teams_per_block > 1) __syncthreads();
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      if (!rows.has_any(k)) continue;
      const int column = rows.column(k);
      C* const own =
          teams_per_block > 1 ? shared + team.index() * access.columns : to + chunk * p.columns;
      if constexpr (Access::kAligned) {
        store(own + column, own_sums[k]);
      } else {
#pragma unroll
        for (int i = 0; i < kLanes; ++i)
          if (access.has(column, i)) own[column + i] = own_sums[k][i];
      }
    }
    if (teams_per_block == 1) return;
    __syncthreads();
    for (int column = static_cast<int>(threadIdx.x); column < access.columns;
         column += blockDim.x) {
      C sum = 0;
      for (int t = 0; t < teams_per_block; ++t) sum += shared[t * access.columns + column];
      to[chunk * p.columns + column] = sum;
    }
  };
  if (p.grad_weight != nullptr) store_partial(weight_sum, partial);
  if constexpr (kCentered) {
    if (p.grad_bias != nullptr)
      store_partial(bias_sum, p.grad_weight == nullptr ? partial : partial + chunks * p.columns);
  }
}

template <class Access, bool kCentered, bool kAdds, int kStages>
Status launch_stream(const NormBackward& p, const StreamPlan& plan, Allocate allocate,
                     CUstream_st* stream) {
  using C = Compute<typename Access::T>;
  const Grid grid{dim3(static_cast<unsigned>(plan.teams << plan.team.log_blocks)),
                  dim3(static_cast<unsigned>(plan.team.block_threads())), plan.team.blocks(),
                  plan.shared_bytes};
  C* const partial = allocate_partials<C>(p, plan.teams, allocate);
  const Status status = launch_overlapped(stream_rows<Access, kCentered, kAdds, kStages>, grid,
                                          stream, p, plan.team, partial);
  return status.ok() ? finish_partials(p, plan.teams, partial, stream) : status;
}

template <class Access>
Status launch_stream(const NormBackward& p, const StreamPlan& plan, Allocate allocate,
                     CUstream_st* stream) {
  const auto launch_centered = [&](auto centered) {
    const auto with_sum = [&](auto adds) {
      return plan.stages == 3 ? launch_stream<Access, centered, adds, 3>(p, plan, allocate, stream)
                              : launch_stream<Access, centered, adds, 2>(p, plan, allocate, stream);
    };
    return p.grad_sum == nullptr ? with_sum(std::false_type{}) : with_sum(std::true_type{});
  };
  return p.centered ? launch_centered(std::true_type{}) : launch_centered(std::false_type{});
}

}  // namespace
}  // namespace torchkiln::cuda::norm_gradients

namespace torchkiln::cuda {

template <class T>
Status NormBackwardByDtype<T>::launch(const NormBackward& p, const norm_gradients::StreamPlan& plan,
                                      Allocate allocate, CUstream_st* stream) {
  if constexpr (sizeof(T) < 8) {
    if (plan.alignment == Alignment::shared_offset)
      return norm_gradients::launch_stream<RowVectors<T, kVectorLanes<T>, false>>(p, plan, allocate,
                                                                                  stream);
  }
  return norm_gradients::launch_stream<RowVectors<T, kVectorLanes<T>, true>>(p, plan, allocate,
                                                                             stream);
}

}  // namespace torchkiln::cuda
