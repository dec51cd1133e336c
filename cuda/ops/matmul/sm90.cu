// Products of half precision on compute capability 9.0, compiled for 90a only: the kernel, whose
// roles are in detail/gemm/sm90_roles.cuh, and its launch.

#include <algorithm>

#include "detail/gemm/sm90_roles.cuh"
#include "detail/gemm/variants.h"
#include "torchkiln/device/launch.cuh"

namespace torchkiln::gemm::sm90 {
namespace {

template <class T>
__device__ __forceinline__ void init_barriers(Shared<T>& shared) {
  for (int multiplier = 0; multiplier < kMultipliers; ++multiplier) {
    ::cuda::ptx::mbarrier_init(&shared.sums_full[multiplier], kWarpgroup);
    ::cuda::ptx::mbarrier_init(&shared.sums_empty[multiplier], kFinishers);
  }
  StageRing<kStages>(shared.stages).init(kMultipliers);
}

template <class T, Major kMajorA, Major kMajorB>
__global__ void __launch_bounds__(kThreads, 1) matmul_kernel(const __grid_constant__ Parameters p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<T>*>(memory);
  if (threadIdx.x == 0) init_barriers(shared);
  __syncthreads();
  wait_for_previous_kernel();
  const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroup;
  if (warpgroup < kMultipliers) {
    wgmma::increase_registers<kMultiplierRegisters>();
    multiply<T, kMajorA, kMajorB>(p, shared, warpgroup);
  } else {
    wgmma::decrease_registers<kOtherRegisters>();
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
    if (thread >= kWarpLanes) {
      finish(p, shared, thread / kWarpLanes - 1, thread % kWarpLanes);
    } else if (thread == 0) {
      produce<T, kMajorA, kMajorB>(p, shared);
    }
    __syncwarp();
  }
}

/// An operand as a matrix for the copy engine.
struct Operand {
  Major major;
  MapShape shape;
};

Operand describe(const Matrices& from, int64_t outer, int64_t depth, int64_t outer_stride,
                 int64_t depth_stride, int64_t batch) {
  // The stride of a dimension of size 1 is arbitrary; prefer to read it as contiguous.
  const bool k_adjacent = depth_stride == 1 || (depth == 1 && outer_stride != 1);
  const Major major = k_adjacent ? Major::k : Major::outer;
  MapShape shape{from.data,
                 k_adjacent ? depth : outer,
                 k_adjacent ? outer : depth,
                 batch,
                 k_adjacent ? outer_stride : depth_stride,
                 from.batch_stride};
  constexpr int64_t kLanes = 8;  // per 16-byte vector
  if (shape.outer == 1) shape.outer_stride = ceil_div(shape.inner, kLanes) * kLanes;
  if (from.batch_stride == 0) shape.batch = 1;
  if (shape.batch == 1) shape.batch_stride = shape.outer * shape.outer_stride;
  return {major, shape};
}

Operand describe_a(const Matmul& p) {
  return describe(p.a, p.m, p.k, p.a.row_stride, p.a.column_stride, p.batch);
}
Operand describe_b(const Matmul& p) {
  return describe(p.b, p.n, p.k, p.b.column_stride, p.b.row_stride, p.batch);
}
MapShape describe_result(const Matmul& p, const void* data) {
  return {data, p.n, p.m, p.batch, p.n, p.m * p.n};
}

bool is_adjacent(const Matrices& matrices, int64_t rows, int64_t columns) {
  return matrices.row_stride == 1 || matrices.column_stride == 1 || rows == 1 || columns == 1;
}

template <class T, Major kMajorA, Major kMajorB>
Status launch(const Parameters& parameters, int multiprocessors, cudaStream_t stream) {
  constexpr int kSharedBytes = sizeof(Shared<T>);
  static_assert(kSharedBytes <= 227 * 1024, "more shared memory than a block can have");
  const int blocks = std::min(parameters.tiles, multiprocessors);
  const Grid grid{dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 1, kSharedBytes};
  return launch_kernel(matmul_kernel<T, kMajorA, kMajorB>, grid, /*overlaps=*/true, stream,
                       parameters);
}

template <class T>
Status matmul_of(const Matmul& p, int multiprocessors, cudaStream_t stream) {
  const Operand a = describe_a(p);
  const Operand b = describe_b(p);
  Parameters parameters{};
  const auto box = [](const Operand& operand) {
    return operand.major == Major::k ? kPanelWidth : kTileDepth;
  };
  Status status = make_tensor_map<T>(parameters.a, a.shape, box(a));
  if (status.ok()) status = make_tensor_map<T>(parameters.b, b.shape, box(b));
  if (status.ok())
    status = make_tensor_map<T>(parameters.out, describe_result(p, p.out), kStripRows);
  if (status.ok() && p.preactivation != nullptr)
    status = make_tensor_map<T>(parameters.preactivation, describe_result(p, p.preactivation),
                                kStripRows);
  if (!status.ok()) return status;
  const int64_t tile_rows = ceil_div(p.m, kTileRows);
  const int64_t tile_columns = ceil_div(p.n, kTileColumns);
  const int64_t tiles = tile_rows * tile_columns * p.batch;
  if (tiles > INT32_MAX / 2) return {"more tiles than a 32-bit number counts"};
  parameters.bias = p.bias;
  parameters.residual = p.residual;
  parameters.bias_is_float = p.bias_dtype == Dtype::float32;
  parameters.keeps_preactivation = p.preactivation != nullptr;
  parameters.repeats_a = p.a.batch_stride == 0;
  parameters.repeats_b = p.b.batch_stride == 0;
  parameters.activation = p.activation;
  parameters.scale = static_cast<float>(p.scale);
  parameters.m = static_cast<int>(p.m);
  parameters.n = static_cast<int>(p.n);
  parameters.depth_steps = static_cast<int>(ceil_div(p.k, kTileDepth));
  parameters.tile_rows = static_cast<int>(tile_rows);
  parameters.tile_columns = static_cast<int>(tile_columns);
  parameters.tiles = static_cast<int>(tiles);
  const bool k_major_b = b.major == Major::k;
  if (a.major == Major::k) {
    return k_major_b ? launch<T, Major::k, Major::k>(parameters, multiprocessors, stream)
                     : launch<T, Major::k, Major::outer>(parameters, multiprocessors, stream);
  }
  return k_major_b ? launch<T, Major::outer, Major::k>(parameters, multiprocessors, stream)
                   : launch<T, Major::outer, Major::outer>(parameters, multiprocessors, stream);
}

}  // namespace

bool fits(const Matmul& p) {
  return size_of(p.dtype) == 2 && p.k > 0 && is_adjacent(p.a, p.m, p.k) &&
         is_adjacent(p.b, p.k, p.n) && fits_tensor_map(describe_a(p).shape, p.dtype) &&
         fits_tensor_map(describe_b(p).shape, p.dtype) &&
         fits_tensor_map(describe_result(p, p.out), p.dtype) &&
         (p.preactivation == nullptr ||
          fits_tensor_map(describe_result(p, p.preactivation), p.dtype)) &&
         aligned(p.residual);
}

Status matmul(const Matmul& p, int multiprocessors, cudaStream_t stream) {
  if (p.dtype == Dtype::float16) return matmul_of<__half>(p, multiprocessors, stream);
  return matmul_of<__nv_bfloat16>(p, multiprocessors, stream);
}

}  // namespace torchkiln::gemm::sm90
