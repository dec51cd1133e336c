#pragma once

// Gradients of norms of rows that lie alike: each is read once, and arrives ahead of its use.

#include "backward_common.cuh"
#include "detail/reduce/columns.cuh"
#include "detail/rowwise/pipeline.cuh"

namespace torchkiln::cuda {

using namespace reduce;
namespace {

// With so many registers a thread, one block fills a multiprocessor. Teams of fewer threads share
// it and the parameters of the columns, which leaves room for one more row of each on the way.
constexpr int kThreads = 512;

// Of clusters of more than kMostClusterBlocks: with more warps the shared memory of a block of two
// stages would leave spilled registers too little of the cache.
constexpr int kLargeBlockWarps = 11;
constexpr int kLargeClusterWarps = kLargeClusterBlocks * kLargeBlockWarps;

template <class Access>
using Parameters = ColumnParameters<Compute<typename Access::T>, Access::kLanes, kItems>;

/// (x - mean) * rstd, of half precision in one step: what that loses is far below the rounding of
/// x.
template <class T, class C>
__device__ __forceinline__ C normalized(C x, C mean, C rstd) {
  return sizeof(T) == 2 ? x * rstd - mean * rstd : (x - mean) * rstd;
}

/// Teams that take one row after another: rows arrive in shared memory ahead of their use. The sums
/// over the columns stay in the registers of the thread that has these columns of every row, so a
/// team's rows must lie alike: they are a multiple of the lanes apart.
template <class Access, bool kCentered, bool kAdds, int kStages>
__global__ void __launch_bounds__(kThreads)
    stream_rows(NormBackward p, TeamShape shape, Compute<typename Access::T>* partial) {
  using T = typename Access::T;
  using C = Compute<T>;
  constexpr int kLanes = Access::kLanes;
  constexpr int kSlots = kStages == 3 ? kMostWarps : kLargeClusterWarps;
  __shared__ TeamStorage<C, 2, kSlots> storage;
  extern __shared__ uint4 memory[];
  Team<C, 2, true, kSlots> team(shape, storage);
  // A block's teams take rows that lie alike, too, because they share the parameters.
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
  if constexpr (kAdds) rows.will_read(p.grad_sum_row_stride);
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
  const C share = C(1) / static_cast<C>(p.columns);

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
        C g[kLanes], n[kLanes], weight[kLanes];
        rows.read(0, k, g);
        rows.read(1, k, n);
        weights.read(k, weight);
#pragma unroll
        for (int i = 0; i < kLanes; ++i) {
          n[i] = normalized<T>(n[i], mean, rstd);
          weight_sum[k][i] += g[i] * n[i];
          const C passed = g[i] * weight[i];
          sums[0] += passed * n[i];
          if constexpr (kCentered) {
            bias_sum[k][i] += g[i];
            sums[1] += passed;
          }
        }
      }
    }
    if (p.grad_x != nullptr) {
      team.reduce(sums, Sum{});
      const C slope = -rstd * share * sums[0];
      const C level = kCentered ? -rstd * share * sums[kCentered ? 1 : 0] : C(0);
      // Of half precision, normalized(x) * slope + level in one step.
      const C x_slope = rstd * slope;
      const C x_level = level - mean * x_slope;
      T* grad_x = static_cast<T*>(p.grad_x) + row * p.columns;
      typename Access::Item others[kItems];
      const bool by_vectors = rows.has_neighbours(row, p.rows);
      if constexpr (kAdds) {
        if (inside) rows.load(grad_sum + row * p.grad_sum_row_stride, by_vectors, others);
      }
#pragma unroll
      for (int k = 0; k < kItems; ++k) {
        C g[kLanes], n[kLanes], weight[kLanes];
        rows.read(0, k, g);
        rows.read(1, k, n);
        weights.read(k, weight);
#pragma unroll
        for (int i = 0; i < kLanes; ++i) {
          const C through = sizeof(T) == 2 ? n[i] * x_slope + x_level
                                           : normalized<T>(n[i], mean, rstd) * slope + level;
          g[i] = g[i] * weight[i] * rstd + through;
        }
        if constexpr (kAdds) {
          if (inside)
            rows.complete(grad_sum + row * p.grad_sum_row_stride, by_vectors, k, others[k]);
          C other[kLanes];
          widen(others[k], other);
#pragma unroll
          for (int i = 0; i < kLanes; ++i) g[i] += other[i];
        }
        rows.save(inside, grad_x, k, g);
      }
      rows.save_parts(inside, grad_x);
    }
    rows.pass();
  }

  // One row of partial sums for each block, or cluster.
  const int teams_of_block = shape.per_block;
  const int64_t chunk = team.group();
  const int64_t chunks = team.groups();
  const auto leave = [&](const auto& own_sums, C* to) {
    C* shared = reinterpret_cast<C*>(memory);
    if (teams_of_block > 1) __syncthreads();
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      if (!rows.has_any(k)) continue;
      const int column = rows.column(k);
#pragma unroll
      for (int i = 0; i < kLanes; ++i) {
        if (!access.has(column, i)) continue;
        if (teams_of_block > 1) {
          shared[team.index() * access.columns + column + i] = own_sums[k][i];
        } else {
          to[chunk * p.columns + column + i] = own_sums[k][i];
        }
      }
    }
    if (teams_of_block == 1) return;
    __syncthreads();
    for (int column = static_cast<int>(threadIdx.x); column < access.columns;
         column += blockDim.x) {
      C sum = 0;
      for (int t = 0; t < teams_of_block; ++t) sum += shared[t * access.columns + column];
      to[chunk * p.columns + column] = sum;
    }
  };
  if (p.grad_weight != nullptr) leave(weight_sum, partial);
  if constexpr (kCentered) {
    if (p.grad_bias != nullptr)
      leave(bias_sum, p.grad_weight == nullptr ? partial : partial + chunks * p.columns);
  }
}

Alignment alignment_of(const NormBackward& p) {
  const TensorRows tensors[] = {{p.grad, p.grad_row_stride},
                                {p.z, p.z_row_stride},
                                {p.grad_sum, p.grad_sum_row_stride},
                                {p.grad_x, p.columns}};
  const Alignment alignment = alignment_of(tensors, p.dtype, p.rows, p.columns);
  return alignment == Alignment::vector && !aligned(p.weight, kVectorBytes)
             ? alignment_with_offset(p.dtype)
             : alignment;
}

/// How rows are walked, by no team where they do not fit or lie apart.
struct StreamPlan {
  TeamShape team;
  int stages;  // rows that are in shared memory or on the way to it
  int shared_bytes;
  int64_t teams;  // blocks, or clusters of them
};

/// How many of the clusters run at the same time, each of whose blocks fills a multiprocessor:
/// those of a cluster belong to one GPC, of which some have no multiple of them. One more would
/// begin when the others are done, and take as long again. 0 where no GPC has so many.
int64_t clusters_at_once(const StreamPlan& plan) {
  const int blocks = plan.team.blocks();
  if (blocks == 1) return current_device().multiprocessors;
  constexpr int kDevices = 64;
  static int known[kDevices][kLargeClusterBlocks + 1] = {};  // two threads that ask write the same
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kDevices) return 0;
  int& entry = known[device][blocks];
  int found = __atomic_load_n(&entry, __ATOMIC_RELAXED);
  if (found == 0) {
    // Stands for all: a block of each has a multiprocessor's registers.
    const auto kernel = stream_rows<RowVectors<float, kVectorLanes<float>, true>, false, false, 2>;
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(static_cast<unsigned>(plan.team.block_threads()));
    config.dynamicSmemBytes = static_cast<size_t>(plan.shared_bytes);
    config.attrs = &cluster;
    config.numAttrs = 1;
    const bool known_to_run =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             plan.shared_bytes) == cudaSuccess &&
        (blocks <= kMostClusterBlocks ||
         cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) ==
             cudaSuccess) &&
        cudaOccupancyMaxActiveClusters(&found, kernel, &config) == cudaSuccess;
    (void)cudaGetLastError();
    if (!known_to_run || found < 1) found = -1;
    __atomic_store_n(&entry, found, __ATOMIC_RELAXED);
  }
  return std::max(found, 0);
}

StreamPlan plan_stream(const NormBackward& p, Alignment alignment) {
  StreamPlan plan{};
  if (alignment == Alignment::scalar) return plan;
  const int lanes = kVectorBytes / static_cast<int>(size_of(p.dtype));
  const int64_t vectors = ceil_div(p.columns, lanes) + (alignment == Alignment::vector ? 0 : 1);
  const int64_t threads = ceil_div(vectors, kItems);
  const Device device = current_device();
  const int most_blocks = device.runs_90_code ? kMostClusterBlocks : 1;
  plan.team = team_of(threads, kThreads, kThreads, most_blocks);
  if (plan.team.size() < threads && most_blocks > 1)
    plan.team = team_of(threads, kLargeBlockWarps * kWarpLanes, kThreads, kLargeClusterBlocks);
  if (plan.team.size() < threads) return plan;
  const auto shared_bytes = [&](int stages) {
    const int parameters = lanes * static_cast<int>(sum_bytes(p)) * plan.team.threads;
    return kItems * (stages * 2 * kVectorBytes * kThreads + parameters);
  };
  const auto fits = [&](int stages) {
    const bool large = plan.team.blocks() > kMostClusterBlocks;
    const size_t storage = stages == 3 ? sizeof(TeamStorage<float, 2>)
                                       : sizeof(TeamStorage<float, 2, kLargeClusterWarps>);
    const int storage_bytes = static_cast<int>(storage * (sum_bytes(p) / sizeof(float)));
    return !(large && stages == 3) && shared_bytes(stages) + storage_bytes <= device.shared_bytes;
  };
  if (!fits(2)) return plan;
  plan.stages = fits(3) ? 3 : 2;
  plan.shared_bytes = shared_bytes(plan.stages);
  plan.teams = std::min(clusters_at_once(plan), ceil_div(p.rows, plan.team.per_block));
  // A multiple of the lanes, so that the rows of a block lie alike.
  if (alignment == Alignment::shared_offset && plan.teams > 0)
    plan.teams = std::max<int64_t>(plan.teams / lanes, 1) * lanes;
  return plan;
}

int outputs(const NormBackward& p) {
  return (p.grad_weight != nullptr ? 1 : 0) + (p.grad_bias != nullptr ? 1 : 0);
}

template <class Access, bool kCentered, bool kAdds, int kStages>
Status launch_stream(const NormBackward& p, const StreamPlan& plan, Allocate allocate,
                     CUstream_st* stream) {
  using C = Compute<typename Access::T>;
  const Grid grid{dim3(static_cast<unsigned>(plan.teams << plan.team.log_blocks)),
                  dim3(static_cast<unsigned>(plan.team.block_threads())), plan.team.blocks(),
                  plan.shared_bytes};
  const auto sums = static_cast<size_t>(plan.teams * p.columns * outputs(p));
  C* partial = static_cast<C*>(allocate(sums * sizeof(C)));
  const Status status = launch_overlapped(stream_rows<Access, kCentered, kAdds, kStages>, grid,
                                          stream, p, plan.team, partial);
  const columns::Plan columns{1, 1, 1, plan.teams, p.rows, p.columns};
  if (!status.ok() || outputs(p) == 0) return status;
  const Result weight{p.grad_weight, p.weight_dtype, 1};
  const Result bias{p.grad_bias, p.weight_dtype, 1};
  if (outputs(p) == 2)
    return columns::finish(static_cast<const C*>(partial), columns, weight, &bias, stream);
  return columns::finish(static_cast<const C*>(partial), columns,
                         p.grad_weight == nullptr ? bias : weight, nullptr, stream);
}

template <class Access>
Status launch_stream(const NormBackward& p, const StreamPlan& plan, Allocate allocate,
                     CUstream_st* stream) {
  const auto start = [&](auto centered) {
    const auto with_sum = [&](auto adds) {
      return plan.stages == 3 ? launch_stream<Access, centered, adds, 3>(p, plan, allocate, stream)
                              : launch_stream<Access, centered, adds, 2>(p, plan, allocate, stream);
    };
    return p.grad_sum == nullptr ? with_sum(std::false_type{}) : with_sum(std::true_type{});
  };
  return p.centered ? start(std::true_type{}) : start(std::false_type{});
}

}  // namespace
}  // namespace torchkiln::cuda
