// out = activation(a b * scale + bias) + residual, and products around a gate. choose.h selects a
// kernel for the operands and the GPU:
//
//   sm90          sm90.cu, sm90_gate.cu   half precision on 9.0, if it beats cuBLAS or without it
//   library       cuBLAS, by the caller   otherwise, if the caller has it
//   tensor_core   tensor_core.cu          half precision since 8.0
//   simt          simt.cu                 everything else
//
// copy_rows.cu copies operands that TMA cannot read in place.

#include "torchkiln/kernels/matmul.h"

#include "choose.h"
#include "detail/gemm/variants.h"
#include "torchkiln/device/launch.cuh"

namespace torchkiln::cuda {

MatmulKernel choose(const Matmul& p, bool has_library) {
  return choose(p, has_library, current_device()).kernel;
}

Status matmul(const Matmul& p, MatmulKernel kernel, cudaStream_t stream) {
  if (p.batch == 0 || p.m == 0 || p.n == 0) return {};
  const Device& device = current_device();
  const Status unsupported{"this kernel does not support these operands or this device"};
  const bool is_supported = plan_of(p, kernel, device).has_value();
  switch (kernel) {
#ifdef TORCHKILN_WITH_SM90
    case MatmulKernel::sm90:
      if (!is_supported) return unsupported;
      return gemm::sm90::matmul(p, device.multiprocessors, stream);
#endif
    case MatmulKernel::tensor_core:
      if (!is_supported) return unsupported;
      return gemm::tensor_core::matmul(p, stream);
    case MatmulKernel::simt:
      return gemm::simt::matmul(p, stream);
    default:
      return {"this kernel was not built"};
  }
}

namespace {

template <class Product>
Status launch_gate(const Product& p, cudaStream_t stream) {
#ifdef TORCHKILN_WITH_SM90
  return gemm::sm90::matmul_gate(p, current_device().multiprocessors, stream);
#else
  (void)p, (void)stream;
  return {"this kernel was not built"};
#endif
}

}  // namespace

bool gains_from_gate(const Matmul& p) { return choose_gate(p, current_device()).has_value(); }
bool gains_from_gate(const GateGradient& p) { return choose_gate(p, current_device()).has_value(); }

Status matmul_gate(const Matmul& p, cudaStream_t stream) { return launch_gate(p, stream); }
Status matmul_gate(const GateGradient& p, cudaStream_t stream) { return launch_gate(p, stream); }

}  // namespace torchkiln::cuda
