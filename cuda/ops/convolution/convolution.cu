// Convolutions with filters of one element as products of matrices, with the moments of the results
// for batch norm. choose.h decides:
//
//   sm90    sm90.cu                                        half precision on 9.0, whole vectors
//   cuDNN   by the caller, before a pass for the moments   otherwise, or where sm90 does not gain

#include "ops/batch_norm/merge.cuh"
#include "pixels.h"
#include "torchkiln/device/launch.cuh"

namespace torchkiln::cuda {

bool takes(const PixelConvolution& p) { return choose(p, current_device()).has_value(); }

bool gains(const PixelConvolution& p) { return gains(p, current_device()); }

Status pixel_convolution(const PixelConvolution& p, Allocate allocate, CUstream_st* stream) {
#ifdef TORCHKILN_WITH_SM90
  const std::optional<PixelPlan> plan = choose(p, current_device());
  if (!plan) return {"no kernel takes these operands on this device"};
  const auto bytes = static_cast<size_t>(plan->parts * p.out) * sizeof(Moments);
  auto* const partial = static_cast<Moments*>(allocate(bytes));
  const Status status = gemm::sm90::pixel_convolution(p, *plan, partial, stream);
  if (!status.ok()) return status;
  BatchNorm merged{};
  merged.moments = p.moments;
  merged.dtype = p.dtype;
  merged.layout = {p.pixels, p.out, 1};
  return merge_moments(merged, partial, plan->parts, p.out, stream);
#else
  (void)p, (void)allocate, (void)stream;
  return {"this kernel was not built"};
#endif
}

}  // namespace torchkiln::cuda
