// Gradients of norms on compute capability 9.0 and later, for aligned rows of 1 to 32 KiB. Every
// element is read once. A team of warps processes rows one by one; small teams share a block. A row
// arrives in shared memory as one bulk copy per tensor:
//
//   shared     |  stage 0: row i  | stage 1: row i+s | stage 2: row i+2s|   s: number of teams
//   memory     | grad, z          | in flight        | in flight        |
//                       |
//   registers  grad, z -> column sums and sums of the row -- add_over_team() -->  grad_x of row i
//                                                                |
//                              every thread has read the stage: row i+3s is copied into it
//
// 64 to 96 KiB in flight per SM suffice. The column sums stay in registers over all
// rows, and are written as one row of partial sums per block.

#include <cuda/ptx>

#include "backward_common.cuh"
#include "backward_finish.cuh"
#include "detail/barrier.cuh"
#include "detail/rowwise/pipeline.cuh"

namespace torchkiln::cuda::norm_gradients {

namespace {

/// The rows of a team in shared memory: grad, z and, with kAdds, grad_sum.
template <class T, bool kAdds>
class RowRing {
 public:
  static constexpr int kTensors = kAdds ? 3 : 2;

  /// The stages begin at `memory`, their barriers at `arrived`. One thread per team is the leader.
  __device__ __forceinline__ RowRing(const NormBackward& p, unsigned char* memory,
                                     uint64_t* arrived, int stages, bool is_leader)
      : p_(p),
        memory_(memory),
        arrived_(arrived),
        stages_(stages),
        row_bytes_(static_cast<int>(p.columns) * static_cast<int>(sizeof(T))),
        is_leader_(is_leader) {
    if (!is_leader) return;
    for (int s = 0; s < stages; ++s) ::cuda::ptx::mbarrier_init(arrived + s, 1);
    ::cuda::ptx::fence_mbarrier_init(::cuda::ptx::sem_release, ::cuda::ptx::scope_cluster);
  }

  /// Starts the copies of the first rows.
  __device__ __forceinline__ void start(int64_t row, int64_t step) {
    step_ = step;
    for (int s = 0; s < stages_; ++s) copy(row + s * step, s);
  }

  /// Waits for the row; at() is valid until release().
  __device__ __forceinline__ void wait() const { wait_for_phase(arrived_ + stage_, parity_); }
  __device__ __forceinline__ const T* at(int tensor, int column) const {
    return reinterpret_cast<const T*>(memory_ + (stage_ * kTensors + tensor) * row_bytes_) + column;
  }
  /// Starts to copy a later row into the stage. All threads of the team must have read the stage.
  __device__ __forceinline__ void release(int64_t row) {
    copy(row + stages_ * step_, stage_);
    if (++stage_ < stages_) return;
    stage_ = 0;
    parity_ ^= 1;
  }

 private:
  __device__ __forceinline__ void copy(int64_t row, int stage) const {
    namespace ptx = ::cuda::ptx;
    if (!is_leader_ || row >= p_.rows) return;
    const T* const rows[3] = {static_cast<const T*>(p_.grad) + row * p_.grad_row_stride,
                              static_cast<const T*>(p_.z) + row * p_.z_row_stride,
                              static_cast<const T*>(p_.grad_sum) + row * p_.grad_sum_row_stride};
    ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared,
                                   arrived_ + stage, static_cast<uint32_t>(kTensors * row_bytes_));
#pragma unroll
    for (int tensor = 0; tensor < kTensors; ++tensor) {
      ptx::cp_async_bulk(ptx::space_cluster, ptx::space_global,
                         memory_ + (stage * kTensors + tensor) * row_bytes_, rows[tensor],
                         static_cast<uint32_t>(row_bytes_), arrived_ + stage);
    }
  }

  const NormBackward& p_;
  unsigned char* memory_;
  uint64_t* arrived_;
  int64_t step_ = 0;
  int stages_;
  int row_bytes_;
  int stage_ = 0;
  uint32_t parity_ = 0;
  bool is_leader_;
};

/// Adds one or two values over the warps of a team, with one barrier. Two sets of slots alternate:
/// a warp writes to a set again only after all warps have read it. With two values, half of the
/// lanes reduce each, so that each step of the reduction is one shuffle.
template <int kSums>
__device__ __forceinline__ void add_over_team(float (&sums)[kSums], int team, int threads,
                                              float (&slots)[kSums][kBulkWarps]) {
  constexpr int kLanes = kWarpLanes / kSums;  // per value
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int value = lane / kLanes;
  float sum = sums[0];
  if constexpr (kSums == 2) {
    const float other = __shfl_xor_sync(~0u, value == 0 ? sums[1] : sums[0], kLanes);
    sum = (value == 0 ? sums[0] : sums[1]) + other;
  }
  sum = reduce_warp(sum, Sum{}, kLanes);
  if (lane % kLanes == 0) slots[value][threadIdx.x / kWarpLanes] = sum;
  asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "r"(threads) : "memory");
  const int warps = threads / kWarpLanes;
  sum = lane % kLanes < warps ? slots[value][team * warps + lane % kLanes] : 0;
  sum = reduce_warp(sum, Sum{}, kBulkWarps);
#pragma unroll
  for (int i = 0; i < kSums; ++i) sums[i] = __shfl_sync(~0u, sum, i * kLanes);
}

/// Rows of up to 16 KiB have 2 vectors per thread, whose weights stay in registers. With 4 vectors
/// the weights are read from shared memory.
template <class T, int kVectors, bool kCentered, bool kAdds>
__global__ void __launch_bounds__(kBulkThreads)
    bulk_rows(NormBackward p, TeamShape shape, int stages, float* partial) {
#if __CUDA_ARCH__ >= 900
  using Access = RowVectors<T, kVectorLanes<T>, true>;
  using Item = typename Access::Item;
  constexpr int kLanes = Access::kLanes;
  constexpr int kSums = kCentered ? 2 : 1;
  __shared__ float slots[2][kSums][kBulkWarps];
  __shared__ uint64_t arrived[kMaxBulkTeams][kMaxBulkStages];
  extern __shared__ __align__(128) unsigned char memory[];
  const int team = static_cast<int>(threadIdx.x) / shape.threads;
  const int rank = static_cast<int>(threadIdx.x) - team * shape.threads;
  const int columns = static_cast<int>(p.columns);
  using Ring = RowRing<T, kAdds>;
  const int ring_bytes = stages * Ring::kTensors * columns * static_cast<int>(sizeof(T));
  Ring ring(p, memory + team * ring_bytes, arrived[team], stages, rank == 0);
  __syncthreads();
  wait_for_previous_kernel();

  const int64_t step = int64_t{gridDim.x} * shape.per_block;
  int64_t row = int64_t{blockIdx.x} * shape.per_block + team;
  ring.start(row, step);
  const Access access(p.grad, columns);
  constexpr bool kKeepsWeights = kVectors == kBulkVectors;
  const auto column = [&](int k) { return (k * shape.threads + rank) * kLanes; };
  float kept[kKeepsWeights ? kVectors : 1][kLanes] = {};
  ColumnParameters<float, kLanes, kVectors> stored(memory + shape.per_block * ring_bytes, rank,
                                                   shape.threads);
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    float weight[kLanes] = {};
    if (column(k) < columns) load_any_weight(p, access, column(k), weight);
    if constexpr (kKeepsWeights) {
#pragma unroll
      for (int i = 0; i < kLanes; ++i) kept[k][i] = weight[i];
    } else {
      stored.set(k, weight);
    }
  }
  const auto read_weight = [&](int k, float (&weight)[kLanes]) {
    if constexpr (kKeepsWeights) {
#pragma unroll
      for (int i = 0; i < kLanes; ++i) weight[i] = kept[k][i];
    } else {
      stored.read(k, weight);
    }
  };
  float weight_sum[kVectors][kLanes] = {};
  float bias_sum[kCentered ? kVectors : 1][kLanes] = {};
  const float* const means = static_cast<const float*>(p.mean);
  const float* const rstds = static_cast<const float*>(p.rstd);
  float next_mean = kCentered && row < p.rows ? means[row] : 0;
  float next_rstd = row < p.rows ? rstds[row] : 0;
  const float inverse_columns = 1 / static_cast<float>(columns);

  int parity = 0;
  for (; row < p.rows; row += step) {
    const float mean = next_mean;
    const float rstd = next_rstd;
    if (row + step < p.rows) {
      if constexpr (kCentered) next_mean = means[row + step];
      next_rstd = rstds[row + step];
    }
    ring.wait();
    Item grads[kVectors] = {}, zs[kVectors] = {}, others[kAdds ? kVectors : 1] = {};
    float sums[kSums] = {};
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (column(k) >= columns) continue;
      grads[k] = load_vector<kLanes>(ring.at(0, column(k)));
      zs[k] = load_vector<kLanes>(ring.at(1, column(k)));
      if constexpr (kAdds) others[k] = load_vector<kLanes>(ring.at(2, column(k)));
      float g[kLanes], z[kLanes], weight[kLanes];
      read_weight(k, weight);
      widen(grads[k], g);
      widen(zs[k], z);
      accumulate<kCentered>(g, z, weight, mean, rstd, weight_sum[k], bias_sum[kCentered ? k : 0],
                            sums);
    }
    add_over_team(sums, team, shape.threads, slots[parity]);
    parity ^= 1;
    ring.release(row);
    const Projection<float> projection =
        projection_of<kCentered>(p, mean, rstd, inverse_columns, sums);
    force_reconversion(grads);
    force_reconversion(zs);
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (column(k) >= columns) continue;
      float g[kLanes], z[kLanes], weight[kLanes];
      read_weight(k, weight);
      widen(grads[k], g);
      widen(zs[k], z);
      project<T>(projection, z, weight, g);
      if constexpr (kAdds) {
        float other[kLanes];
        widen(others[k], other);
        add_lanes(other, g);
      }
      store(static_cast<T*>(p.grad_x) + row * p.columns + column(k), g);
    }
  }

  // Each block stores one row of partial sums.
  const auto store_partial = [&](const auto& own, float* to) {
    float* const shared = reinterpret_cast<float*>(memory);
    const bool alone = shape.per_block == 1;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (column(k) < columns) store((alone ? to : shared + team * columns) + column(k), own[k]);
    }
    if (alone) return;
    __syncthreads();
    for (int c = static_cast<int>(threadIdx.x); c < columns; c += static_cast<int>(blockDim.x)) {
      float sum = 0;
      for (int t = 0; t < shape.per_block; ++t) sum += shared[t * columns + c];
      to[c] = sum;
    }
  };
  if (p.grad_weight != nullptr) store_partial(weight_sum, partial + blockIdx.x * p.columns);
  if constexpr (kCentered) {
    const int64_t chunk = blockIdx.x + (p.grad_weight == nullptr ? 0 : gridDim.x);
    if (p.grad_bias != nullptr) store_partial(bias_sum, partial + chunk * p.columns);
  }
#else
  (void)p, (void)shape, (void)stages, (void)partial;
#endif
}

}  // namespace

Status launch(const NormBackward& p, const BulkPlan& plan, Allocate allocate, CUstream_st* stream) {
  const Grid grid{dim3(static_cast<unsigned>(plan.blocks)),
                  dim3(static_cast<unsigned>(plan.team.block_threads())), 1, plan.shared_bytes};
  float* const partial = allocate_partials<float>(p, plan.blocks, allocate);
  const auto launch = [&](auto kernel) {
    return launch_overlapped(kernel, grid, stream, p, plan.team, plan.stages, partial);
  };
  const Status status = dispatch<float, __half, __nv_bfloat16>(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (plan.vectors == kLongBulkVectors)
      return launch(bulk_rows<T, kLongBulkVectors, false, false>);
    const auto launch_centered = [&](auto centered) {
      return p.grad_sum == nullptr ? launch(bulk_rows<T, kBulkVectors, centered, false>)
                                   : launch(bulk_rows<T, kBulkVectors, centered, true>);
    };
    return p.centered ? launch_centered(std::true_type{}) : launch_centered(std::false_type{});
  });
  return status.ok() ? finish_partials(p, plan.blocks, partial, stream) : status;
}

}  // namespace torchkiln::cuda::norm_gradients
