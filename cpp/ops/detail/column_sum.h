#pragma once

#include <ATen/ATen.h>

#include <numeric>

namespace torchkiln {

/// The dimensions begin <= d < end.
inline c10::SmallVector<int64_t, 8> dims_between(int64_t begin, int64_t end) {
  c10::SmallVector<int64_t, 8> dims(end - begin);
  std::iota(dims.begin(), dims.end(), begin);
  return dims;
}

/// Sums over all dimensions but the last `kept`, with torch's op. That op rounds the terms to the
/// dtype of the sum, so the sum is computed in the wider dtype, then rounded once.
inline at::Tensor sum_to_last(const at::Tensor& tensor, int64_t kept, at::ScalarType dtype) {
  if (tensor.dim() == kept) return tensor.to(dtype);
  const at::ScalarType wider = at::promote_types(tensor.scalar_type(), dtype);
  return at::sum(tensor, dims_between(0, tensor.dim() - kept), /*keepdim=*/false, wider).to(dtype);
}

}  // namespace torchkiln
