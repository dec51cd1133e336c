#pragma once

// The tile of a block, and the epilogue, for the matmul kernels that run on every device.

#include "detail/gemm/plans.h"
#include "torchkiln/device/launch.cuh"
#include "torchkiln/device/vec.cuh"
#include "torchkiln/device/warp.cuh"

namespace torchkiln::gemm {
using namespace device;

/// Assigns tiles of kRows by kColumns results to blocks, one each. Blocks that run together cover a
/// nearly square part of the result, whose rows of A and columns of B stay in L2.
template <int kRows, int kColumns>
struct Tiles {
  static constexpr int64_t kGroupRows = 8;

  int64_t rows;
  int64_t columns;
  int64_t count;

  struct Tile {
    int64_t batch;
    int64_t row;
    int64_t column;
  };

  explicit Tiles(const Matmul& p)
      : rows(ceil_div(p.m, kRows)),
        columns(ceil_div(p.n, kColumns)),
        count(count_tiles(p, kRows, kColumns)) {}

  __device__ __forceinline__ Tile at(int64_t index) const {
    const int64_t batch = index / (rows * columns);
    index -= batch * (rows * columns);
    const int64_t group = index / (kGroupRows * columns);
    index -= group * (kGroupRows * columns);
    const int64_t height = min(kGroupRows, rows - group * kGroupRows);
    const int64_t row = group * kGroupRows + index % height;
    return {batch, row * kRows, index / height * kColumns};
  }
};

/// The epilogue: activation(sum * scale + bias) + residual.
template <class T>
class MatmulResults {
 public:
  using C = Compute<T>;

  explicit MatmulResults(const Matmul& p)
      : bias_(p.bias),
        residual_(static_cast<const T*>(p.residual)),
        out_(static_cast<T*>(p.out)),
        preactivation_(static_cast<T*>(p.preactivation)),
        scale_(static_cast<C>(p.scale)),
        activation_(p.activation),
        bias_is_float_(p.bias_dtype == Dtype::float32),
        rows_(p.m),
        columns_(p.n) {}

  /// for_each(body) must call body(row, column, sum) for every sum of this thread, in fully
  /// unrolled loops. Sums outside the result are not stored.
  template <class ForEach>
  __device__ __forceinline__ void store(int64_t batch, const ForEach& for_each) const {
    const int64_t begin = batch * rows_ * columns_;
    for_each([&](int64_t row, int64_t column, C& sum) {
      sum *= scale_;
      if (row >= rows_ || column >= columns_) return;
      sum += bias(column);
      if (preactivation_ != nullptr)
        preactivation_[begin + row * columns_ + column] = convert<T>(sum);
    });
    with_activation(
        activation_,
        [&](auto tag) {
          using Act = typename decltype(tag)::type;
          for_each([&](int64_t, int64_t, C& sum) { sum = Act::template value<MathFor<T>>(sum); });
        },
        Activations{});
    for_each([&](int64_t row, int64_t column, C& sum) {
      if (row >= rows_ || column >= columns_) return;
      const int64_t at = begin + row * columns_ + column;
      if (residual_ != nullptr) sum += convert<C>(residual_[at]);
      out_[at] = convert<T>(sum);
    });
  }

 private:
  __device__ __forceinline__ C bias(int64_t column) const {
    if (bias_ == nullptr) return C(0);
    if (bias_is_float_) return static_cast<C>(static_cast<const float*>(bias_)[column]);
    return convert<C>(static_cast<const T*>(bias_)[column]);
  }

  const void* bias_;
  const T* residual_;
  T* out_;
  T* preactivation_;
  C scale_;
  Activation activation_;
  bool bias_is_float_;
  int64_t rows_;
  int64_t columns_;
};

}  // namespace torchkiln::gemm
