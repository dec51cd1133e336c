#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>
#include <vector>

namespace torchkiln {

/// The dimensions of a dense tensor, sorted by their strides, the largest first. If the order is
/// logical, as in a contiguous tensor, no view is needed.
class MemoryOrder {
 public:
  MemoryOrder() = default;

  explicit MemoryOrder(const at::Tensor& dense) {
    if (dense.is_contiguous()) return;
    dims_.resize(dense.dim());
    std::iota(dims_.begin(), dims_.end(), 0);
    const auto strides = dense.sym_strides();
    std::stable_sort(dims_.begin(), dims_.end(),
                     [&](int64_t a, int64_t b) { return strides[a] > strides[b]; });
  }

  bool is_logical() const { return dims_.empty(); }

  /// The position in memory of a logical dimension.
  int64_t position_of(int64_t dim) const {
    return std::find(dims_.begin(), dims_.end(), dim) - dims_.begin();
  }

  /// A view of `t` with the dimensions in the order of memory.
  at::Tensor physical(const at::Tensor& t) const { return is_logical() ? t : t.permute(dims_); }

  /// A view of `t`, whose dimensions are in the order of memory, with the dimensions in logical
  /// order.
  at::Tensor logical(const at::Tensor& t) const {
    if (is_logical()) return t;
    std::vector<int64_t> positions(dims_.size());  // g++ warns about a SmallVector
    for (size_t i = 0; i < dims_.size(); ++i) positions[dims_[i]] = static_cast<int64_t>(i);
    return t.permute(positions);
  }

 private:
  c10::SmallVector<int64_t, 8> dims_;
};

/// Sign bits as numbers: 1 where the output was positive, else 0. `like` has the shape of the
/// result and the memory order of the bits.
inline at::Tensor unpack_signs(const at::Tensor& signs, const at::Tensor& like,
                               at::ScalarType dtype) {
  const at::Tensor place = at::arange(8, signs.options());
  const at::Tensor bits = signs.unsqueeze(-1).bitwise_right_shift(place).bitwise_and(1);
  return bits.flatten()
      .slice_symint(0, 0, like.sym_numel())
      .reshape_symint(like.sym_sizes())
      .to(dtype);
}

}  // namespace torchkiln
