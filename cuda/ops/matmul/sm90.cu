// Products of half precision on compute capability 9.0, compiled for 90a only, with an activation
// and a residual.

#include "detail/gemm/sm90_finish.cuh"
#include "detail/gemm/sm90_launch.cuh"
#include "detail/gemm/variants.h"

namespace torchkiln::gemm::sm90 {
namespace {

template <class T, Major kMajorA, Major kMajorB>
__global__ void __launch_bounds__(kThreads, 1) matmul_kernel(const __grid_constant__ Parameters p) {
  run_roles<T, kMajorA, kMajorB>(
      p, [&](Shared<T>& shared, int finisher, int lane) { finish(p, shared, finisher, lane); });
}

template <class T, Major kMajorA, Major kMajorB>
Status launch(const Parameters& parameters, const Grid& grid, cudaStream_t stream) {
  return launch_kernel(matmul_kernel<T, kMajorA, kMajorB>, grid, /*overlaps=*/true, stream,
                       parameters);
}

template <class T>
Status matmul_of(const Matmul& p, int multiprocessors, cudaStream_t stream) {
  Parameters parameters{};
  Status status = make_parameters<T>(p, /*half=*/0, parameters);
  if (status.ok())
    status = make_tensor_map<T>(parameters.out, describe_result(p, p.out), kStripRows);
  if (status.ok() && p.preactivation != nullptr)
    status = make_tensor_map<T>(parameters.preactivation, describe_result(p, p.preactivation),
                                kStripRows);
  if (!status.ok()) return status;
  const Grid grid = grid_of<T>(p, multiprocessors);
  const bool k_major_b = describe_b(p).major == Major::k;
  if (describe_a(p).major == Major::k) {
    return k_major_b ? launch<T, Major::k, Major::k>(parameters, grid, stream)
                     : launch<T, Major::k, Major::outer>(parameters, grid, stream);
  }
  return k_major_b ? launch<T, Major::outer, Major::k>(parameters, grid, stream)
                   : launch<T, Major::outer, Major::outer>(parameters, grid, stream);
}

}  // namespace

Status matmul(const Matmul& p, int multiprocessors, cudaStream_t stream) {
  if (p.dtype == Dtype::float16) return matmul_of<__half>(p, multiprocessors, stream);
  return matmul_of<__nv_bfloat16>(p, multiprocessors, stream);
}

}  // namespace torchkiln::gemm::sm90
