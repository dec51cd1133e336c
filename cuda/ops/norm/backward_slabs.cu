// Gradients of norms for rows of any alignment, or that do not fit in one block. A row is cut into
// slabs of columns. Each block of a team has one slab; the team processes rows one by one:
//
//   copying warp      rows i + 1, i + 2, ... -- bulk copies -->  stages of a ring
//   computing warps   row i         column sums in registers, sums of the slab
//   copying warp      row i         sums of the slab     -- RowExchange -->  other blocks
//   merging warp      row i - 1     sums of all slabs    -- shared memory -->  computing warps
//   computing warps   row i - lag   read the stage again, write grad_x, release the stage
//
// Every element is read from memory once. The copies cover whole 16-byte units, which are mapped
// wherever they hold an element, so that a slab lies in its stage with the offset that it has in
// memory. Blocks wait for each other, so all must be resident: the launch is cooperative.

#include "backward_common.cuh"
#include "backward_finish.cuh"
#include "slab_columns.cuh"

namespace torchkiln::cuda::norm_gradients {

using namespace norm_slabs;
namespace {

/// The slabs of a block. kLanes: elements per access; 1 if rows may begin anywhere.
template <class T, int kLanes, bool kCentered, bool kAdds>
class Slabs : public SlabColumns<T, kLanes, kAdds ? 3 : 2, AddValues, kCentered ? 2 : 1> {
  static constexpr int kSums = kCentered ? 2 : 1;
  using Columns = SlabColumns<T, kLanes, kAdds ? 3 : 2, AddValues, kSums>;
  using Columns::advance_in_run;
  using Columns::arrive;
  using Columns::begin_run;
  using Columns::clear_outside;
  using Columns::column;
  using Columns::first;
  using Columns::first_row;
  using Columns::for_own;
  using Columns::has;
  using Columns::kItems;
  using Columns::lane;
  using Columns::load;
  using Columns::load_parameters;
  using Columns::plan_;
  using Columns::rows_of_run;
  using Columns::runs;
  using Columns::save;
  using Columns::slab_in;
  using Columns::storage_;
  using typename Columns::Cursor;

 public:
  __device__ __forceinline__ Slabs(const NormBackward& p, const SlabRows& rows,
                                   const SlabPlan& plan, float* exchange, unsigned char* memory,
                                   typename Columns::Storage& storage)
      : Columns(rows, plan, exchange, memory, storage), p_(p) {}

  /// The loop of the merging warp.
  __device__ __forceinline__ void merge_rows() const {
    if (p_.grad_x == nullptr) return;
    const auto statistics_of = [this](const Cursor& at) {
      return make_float2(kCentered ? static_cast<const float*>(p_.mean)[at.row] : 0,
                         static_cast<const float*>(p_.rstd)[at.row]);
    };
    Columns::merge_rows(
        statistics_of, [this](const Cursor& at, const float (&sums)[kSums], float2 row) {
          const float factor =
              -factor_of_gradient<kCentered>(p_, row.y) / static_cast<float>(p_.columns);
          storage_.factors[at.stage] =
              make_float4(row.x, row.y, factor * sums[0], kCentered ? factor * sums[kSums - 1] : 0);
        });
  }

  /// The loop of the computing warps.
  __device__ __forceinline__ void compute_rows(float* partial) {
    Cursor at = first(), again = first();
    for (int run = 0; run < runs(); ++run) {
      begin_run(run);
      load_weights();
      at.row = again.row = first_row(run);
      add_run(rows_of_run(run), at, again);
      int chunk = first_row(run);
      if (p_.grad_weight != nullptr) {
        store_sums(weight_sum_, p_.grad_weight, partial, chunk);
        chunk += plan_.runs * plan_.teams;
      }
      if constexpr (kCentered) {
        if (p_.grad_bias != nullptr) store_sums(bias_sum_, p_.grad_bias, partial, chunk);
      }
    }
  }

 private:
  /// Adds the rows of a run to the sums, and writes their gradients of x.
  __device__ __forceinline__ void add_run(int rows, Cursor& at, Cursor& again) {
    const float* const means = static_cast<const float*>(p_.mean);
    const float* const rstds = static_cast<const float*>(p_.rstd);
    float next_mean = 0, next_rstd = 0;
    const auto request = [&](int row) {
      if constexpr (kCentered) next_mean = means[row];
      next_rstd = rstds[row];
    };
    if (rows > 0) request(at.row);
    for (int i = 0; i < rows + plan_.lag; ++i) {
      if (i < rows) {
        const float mean = next_mean;
        const float rstd = next_rstd;
        if (i + 1 < rows) request(at.row + plan_.row_step);
        wait_for_phase(&storage_.full[at.stage], at.parity);
        clear_outside(at);
        add(at, mean, rstd);
        arrive(&storage_.summed[at.stage]);
        advance_in_run(at);
      }
      if (i < plan_.lag) continue;
      if (p_.grad_x != nullptr) {
        wait_for_phase(&storage_.merged[again.stage], again.parity);
        write(again);
      }
      arrive(&storage_.empty[again.stage]);
      advance_in_run(again);
    }
  }

  __device__ __forceinline__ void load_weights() {
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
#pragma unroll
      for (int l = 0; l < kLanes; ++l) {
        weight_[k][l] = has(k, l) ? 1 : 0;
        weight_sum_[k][l] = 0;
        if constexpr (kCentered) bias_sum_[k][l] = 0;
      }
    }
    if (p_.weight == nullptr) return;
    load_parameters(p_.weight, p_.weight_dtype, static_cast<float>(p_.weight_offset), weight_);
  }

  /// Calls body(k, grad, z) for the items of a slab.
  template <class Body>
  __device__ __forceinline__ void for_slab(const Cursor& at, const Body& body) const {
    const T* const grads = slab_in(0, at);
    const T* const zs = slab_in(1, at);
    for_own([&](int k) {
      float g[kLanes], z[kLanes];
      load(grads, k, g);
      load(zs, k, z);
      body(k, g, z);
    });
  }

  /// Adds a slab to the column sums, and stores the row sums of each warp.
  __device__ __forceinline__ void add(const Cursor& at, float mean, float rstd) {
    float sums[kSums] = {};
    for_slab(at, [&](int k, const float (&g)[kLanes], const float (&z)[kLanes]) {
      accumulate<kCentered>(g, z, weight_[k], mean, rstd, weight_sum_[k],
                            bias_sum_[kCentered ? k : 0], sums);
    });
    reduce_warp(sums, Sum{});
    if (lane() > 0) return;
#pragma unroll
    for (int i = 0; i < kSums; ++i)
      storage_.values[at.stage][i][threadIdx.x / kWarpLanes] = sums[i];
  }

  /// Writes the gradients of a slab.
  __device__ __forceinline__ void write(const Cursor& at) const {
    const T* const others = kAdds ? slab_in(2, at) : nullptr;
    T* const grad_x = static_cast<T*>(p_.grad_x) + int64_t{at.row} * p_.columns;
    const float4 factors = storage_.factors[at.stage];
    const auto projection =
        projection_of<kCentered>(p_, RowFactors<float>{factors.x, factors.y, factors.z, factors.w});
    for_slab(at, [&](int k, float (&g)[kLanes], const float (&z)[kLanes]) {
      project<T>(projection, z, weight_[k], g);
      if constexpr (kAdds) {
        float other[kLanes];
        load(others, k, other);
        add_lanes(other, g);
      }
      save(grad_x, k, g);
    });
  }

  /// Stores one row of partial sums per run. If there is only one run in all, stores the gradients.
  __device__ __forceinline__ void store_sums(const float (&sums)[kItems][kLanes], void* result,
                                             float* partial, int chunk) const {
    const reduce::Result results{result, p_.weight_dtype, 1};
    for_own([&](int k) {
#pragma unroll
      for (int l = 0; l < kLanes; ++l) {
        if (!has(k, l)) continue;
        const int at = column(k) + l;
        if (partial == nullptr) {
          results.store(at, sums[k][l]);
        } else {
          partial[int64_t{chunk} * p_.columns + at] = sums[k][l];
        }
      }
    });
  }

  const NormBackward& p_;
  float weight_[kItems][kLanes];
  float weight_sum_[kItems][kLanes];
  float bias_sum_[kCentered ? kItems : 1][kLanes];
};

template <class T, int kLanes, bool kCentered, bool kAdds>
__global__ void __launch_bounds__(kSlabBlockThreads, kSlabBlocks)
    slab_rows(NormBackward p, SlabRows tensors, SlabPlan plan, float* exchange, float* partial) {
#if __CUDA_ARCH__ >= 900
  using Rows = Slabs<T, kLanes, kCentered, kAdds>;
  __shared__ typename Rows::Storage storage;
  extern __shared__ __align__(128) unsigned char memory[];
  Rows rows(p, tensors, plan, exchange, memory, storage);
  if (threadIdx.x == 0) rows.init();
  __syncthreads();
  wait_for_previous_kernel();
  switch (static_cast<int>(threadIdx.x) / kWarpLanes - kSlabWarps) {
    case 0:
      return rows.copy_rows();
    case 1:
      return rows.merge_rows();
    default:
      rows.compute_rows(partial);
  }
#else
  (void)p, (void)tensors, (void)plan, (void)exchange, (void)partial;
#endif
}

}  // namespace

Status launch(const NormBackward& p, const GradientSlabsPlan& call, Allocate allocate,
              CUstream_st* stream) {
  const SlabPlan& plan = call.plan;
  float* exchange = nullptr;
  if (call.exchanges) {
    const Status status =
        allocate_exchange(p.rows, p.centered ? 2 : 1, plan.blocks, allocate, stream, exchange);
    if (!status.ok()) return status;
  }
  const int chunks = plan.teams * plan.runs;
  float* const partial = chunks > 1 ? allocate_partials<float>(p, chunks, allocate) : nullptr;
  const Status status = dispatch<float, __half, __nv_bfloat16>(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto launch = [&](auto lanes, auto centered, auto adds) {
      return launch_overlapped(slab_rows<T, lanes, centered, adds>, make_grid(call), stream, p,
                               call.rows, plan, exchange, partial);
    };
    const auto with_sum = [&](auto lanes, auto centered) {
      return p.grad_sum == nullptr ? launch(lanes, centered, std::false_type{})
                                   : launch(lanes, centered, std::true_type{});
    };
    const auto with_center = [&](auto lanes) {
      return p.centered ? with_sum(lanes, std::true_type{}) : with_sum(lanes, std::false_type{});
    };
    return plan.in_vectors ? with_center(std::integral_constant<int, kVectorLanes<T>>{})
                           : with_center(std::integral_constant<int, 1>{});
  });
  return status.ok() && chunks > 1 ? finish_partials(p, chunks, partial, stream) : status;
}

}  // namespace torchkiln::cuda::norm_gradients
