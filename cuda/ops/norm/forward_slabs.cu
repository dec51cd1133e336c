// Norms of long rows. A row is cut into slabs of columns. Each block of a team has one slab; the
// team processes rows one by one:
//
//   copying warp      rows i + 1, i + 2, ... -- bulk copies -->  stages of a ring
//   computing warps   row i         moments of the slab
//   copying warp      row i         moments of the slab  -- RowExchange -->  other blocks
//   merging warp      row i - 1     moments of all slabs -- shared memory -->  computing warps
//   computing warps   row i - lag   read the stage again, write y, release the stage
//
// A thread keeps weight and bias of its columns in registers. Kernels that have whole rows read
// both again for each row, from L2: as many bytes as x and y have. Blocks wait for each other, so
// all must be resident: the launch is cooperative.

#include "forward_moments.cuh"
#include "launch.cuh"
#include "slab_columns.cuh"

namespace torchkiln::cuda {

using namespace norm_slabs;
namespace {

/// Merges the moments of slabs or warps, one per lane, with the interface of AddValues. Float32 is
/// merged around the mean of all lanes. Half precision is merged around the mean of the first lane,
/// which saves a reduction: the squared distance of that mean from the mean of all is at most the
/// variance times the number of slabs.
template <class T>
struct MergeMomentsOfLanes {
  template <int kPerLane>
  __device__ __forceinline__ void operator()(const float (&values)[kPerLane][4], float (&merged)[4],
                                             int lanes) const {
    const float own = values[0][0] > 0 ? values[0][1] + __fdividef(values[0][3], values[0][0]) : 0;
    float center = __shfl_sync(~0u, own, 0, lanes);
    if constexpr (sizeof(T) > 2) {
      float total[2] = {};  // count and sum, scaled so that the sum does not overflow
#pragma unroll
      for (int k = 0; k < kPerLane; ++k) {
        constexpr float kScale = 1.0f / (1 << 20);
        total[0] += values[k][0] * kScale;
        total[1] += values[k][0] * kScale * values[k][1] + values[k][3] * kScale;
      }
      reduce_warp(total, Sum{}, lanes);
      center = total[0] > 0 ? total[1] / total[0] : 0;
    }
    float sums[3] = {};
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
      const float distance = values[k][1] - center;
      sums[0] += values[k][0];
      sums[1] += values[k][2] + distance * (values[k][0] * distance + 2 * values[k][3]);
      sums[2] += values[k][3] + values[k][0] * distance;
    }
    reduce_warp(sums, Sum{}, lanes);
    merged[0] = sums[0];
    merged[1] = center;
    merged[2] = sums[1];
    merged[3] = sums[2];
  }
};

template <class T, bool kCentered>
using MergeOf = std::conditional_t<kCentered, MergeMomentsOfLanes<T>, AddValues>;

/// The slabs of a block. kLanes: elements per access; 1 if rows may begin anywhere. kAdds:
/// normalizes x + residual, and also writes this sum.
template <class T, int kLanes, bool kCentered, bool kAdds>
class NormSlabs
    : public SlabColumns<T, kLanes, kAdds ? 2 : 1, MergeOf<T, kCentered>, kMoments<kCentered>> {
  static constexpr int kValues = kMoments<kCentered>;
  using Merge = MergeOf<T, kCentered>;
  using Columns = SlabColumns<T, kLanes, kAdds ? 2 : 1, Merge, kValues>;
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
  using Columns::set_outside;
  using Columns::slab_in;
  using Columns::storage_;
  using typename Columns::Cursor;

 public:
  __device__ __forceinline__ NormSlabs(const Norm& p, const SlabRows& rows, const SlabPlan& plan,
                                       float* exchange, unsigned char* memory,
                                       typename Columns::Storage& storage)
      : Columns(rows, plan, exchange, memory, storage), p_(p) {}

  /// The loop of the merging warp.
  __device__ __forceinline__ void merge_rows() const {
    Columns::merge_rows([](const Cursor&) { return 0; },
                        [this](const Cursor& at, const float (&values)[kValues], int) {
                          const RowStatistics<float> row = statistics_of<kCentered>(p_, values);
                          storage_.factors[at.stage] =
                              make_float4(row.center, row.rest, row.rstd, 0);
                          if (blockIdx.x == 0) store_statistics(p_, at.row, row);
                        });
  }

  /// The loop of the computing warps.
  __device__ __forceinline__ void compute_rows() {
    Cursor at = first(), again = first();
    for (int run = 0; run < runs(); ++run) {
      begin_run(run);
      load_affine();
      at.row = again.row = first_row(run);
      const int rows = rows_of_run(run);
      for (int i = 0; i < rows + plan_.lag; ++i) {
        if (i < rows) {
          wait_for_phase(&storage_.full[at.stage], at.parity);
          clear_outside(at);
          reduce(at);
          arrive(&storage_.summed[at.stage]);
          advance_in_run(at);
        }
        if (i < plan_.lag) continue;
        wait_for_phase(&storage_.merged[again.stage], again.parity);
        write(again);
        arrive(&storage_.empty[again.stage]);
        advance_in_run(again);
      }
    }
  }

 private:
  /// Loads weight + weight_offset and bias, and counts the elements of a row that belong to this
  /// warp.
  __device__ __forceinline__ void load_affine() {
    float count[1] = {};
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
#pragma unroll
      for (int l = 0; l < kLanes; ++l) {
        weight_[k][l] = 1;
        if constexpr (kCentered) bias_[k][l] = 0;
        count[0] += has(k, l) ? 1 : 0;
      }
    }
    reduce_warp(count, Sum{});
    count_of_warp_ = count[0];
    if (p_.weight != nullptr)
      load_parameters(p_.weight, p_.weight_dtype, static_cast<float>(p_.weight_offset), weight_);
    if constexpr (kCentered) {
      if (p_.bias != nullptr) load_parameters(p_.bias, p_.weight_dtype, 0.0f, bias_);
    }
  }

  /// Calls body(k, z) for the items of a slab; z has the elements to normalize.
  template <class Body>
  __device__ __forceinline__ void for_slab(const Cursor& at, const Body& body) const {
    const T* const xs = slab_in(0, at);
    const T* const residuals = kAdds ? slab_in(1, at) : nullptr;
    for_own([&](int k) {
      float z[kLanes];
      load(xs, k, z);
      if constexpr (kAdds) {
        float other[kLanes];
        load(residuals, k, other);
#pragma unroll
        for (int l = 0; l < kLanes; ++l) z[l] = convert<float>(convert<T>(z[l] + other[l]));
      }
      body(k, z);
    });
  }

  /// Stores the moments of a slab over each warp.
  __device__ __forceinline__ void reduce(const Cursor& at) {
    float z[kItems][kLanes];
    for_slab(at, [&](int k, const float (&values)[kLanes]) {
#pragma unroll
      for (int l = 0; l < kLanes; ++l) z[k][l] = values[l];
    });
    // The number near which moments are computed: the first lane has the first elements, if the
    // warp has any.
    const float own = column(0) < 0 ? z[0][kLanes - 1] : z[0][0];
    const auto for_elements = [&](float outside, const auto& body) {
      for_own([&](int k) {
        set_outside(k, z[k], outside);
#pragma unroll
        for (int l = 0; l < kLanes; ++l) body(z[k][l]);
      });
    };
    float values[kValues];
    moments_of_warp<T, kCentered>(count_of_warp_, __shfl_sync(~0u, own, 0), values, for_elements);
    if (lane() > 0) return;
#pragma unroll
    for (int i = 0; i < kValues; ++i)
      storage_.values[at.stage][i][threadIdx.x / kWarpLanes] = values[i];
  }

  __device__ __forceinline__ void write(const Cursor& at) const {
    const int64_t begin = int64_t{at.row} * p_.columns;
    const float4 factors = storage_.factors[at.stage];
    const RowStatistics<float> row{factors.x, factors.y, factors.z};
    for_slab(at, [&](int k, float (&z)[kLanes]) {
      if constexpr (kAdds) save(static_cast<T*>(p_.sum) + begin, k, z);
      if constexpr (kCentered) {
        normalize<T>(p_, row, weight_[k], bias_[k], z);
      } else {
        const float zeros[kLanes] = {};
        normalize<T>(p_, {0, 0, row.rstd}, weight_[k], zeros, z);
      }
      save(static_cast<T*>(p_.y) + begin, k, z);
    });
  }

  const Norm& p_;
  float weight_[kItems][kLanes];
  float bias_[kCentered ? kItems : 1][kLanes];
  float count_of_warp_;
};

template <class T, int kLanes, bool kCentered, bool kAdds>
__global__ void __launch_bounds__(kSlabBlockThreads, kSlabBlocks)
    norm_slab_rows(Norm p, SlabRows tensors, SlabPlan plan, float* exchange) {
#if __CUDA_ARCH__ >= 900
  using Rows = NormSlabs<T, kLanes, kCentered, kAdds>;
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
      rows.compute_rows();
  }
#else
  (void)p, (void)tensors, (void)plan, (void)exchange;
#endif
}

}  // namespace

Status launch(const Norm& p, const NormSlabsPlan& call, Allocate allocate, CUstream_st* stream) {
  const SlabPlan& plan = call.plan;
  float* exchange = nullptr;
  const Status status = allocate_exchange(p.rows, p.centered ? kMoments<true> : kMoments<false>,
                                          plan.blocks, allocate, stream, exchange);
  if (!status.ok()) return status;
  return dispatch<float, __half, __nv_bfloat16>(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto launch = [&](auto kernel) {
      return launch_overlapped(kernel, make_grid(call), stream, p, call.rows, plan, exchange);
    };
    const auto with_sum = [&](auto lanes, auto centered) {
      return p.residual == nullptr ? launch(norm_slab_rows<T, lanes, centered, false>)
                                   : launch(norm_slab_rows<T, lanes, centered, true>);
    };
    const auto with_center = [&](auto lanes) {
      return p.centered ? with_sum(lanes, std::true_type{}) : with_sum(lanes, std::false_type{});
    };
    return plan.in_vectors ? with_center(std::integral_constant<int, kVectorLanes<T>>{})
                           : with_center(std::integral_constant<int, 1>{});
  });
}

}  // namespace torchkiln::cuda
