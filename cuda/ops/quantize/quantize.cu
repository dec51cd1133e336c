// Selects between the kernels of rows.cu and of tiles.cu.

#include "torchkiln/kernels/quantize.h"

#include "kernels.cuh"
#include "torchkiln/device/alignment.h"

namespace torchkiln::cuda {
namespace {

/// Whether each lane of a patch accesses whole vectors of 8 elements of x and of `data`, and of 16
/// elements of `transposed`.
bool in_vectors(const Quantize& p) {
  constexpr int64_t kLane = 8, kVector = device::kVectorBytes;
  const bool rows = device::in_steps_of(kLane, {p.columns, p.rows == 1 ? 0 : p.stride}) &&
                    device::aligned(p.x, p.x_scale == nullptr ? kVector : kLane) &&
                    device::aligned(p.data, kLane);
  if (p.transposed == nullptr) return rows;
  return rows && p.rows % kVector == 0 && device::aligned(p.transposed);
}

}  // namespace

Status quantize(const Quantize& p, CUstream_st* stream) {
  if (p.rows == 0 || p.columns == 0) return {};
  const bool aligned = in_vectors(p);
  return p.transposed == nullptr ? fp8::launch_rows(p, aligned, stream)
                                 : fp8::launch_tiles(p, aligned, stream);
}

bool has_block_products() {
  int device = 0, major = 0, minor = 0;
  const bool known =
      cudaGetDevice(&device) == cudaSuccess &&
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess;
  return known && major == 9 && minor == 0;
}

}  // namespace torchkiln::cuda
