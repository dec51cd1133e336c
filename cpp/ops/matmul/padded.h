#pragma once

// Copies of half-precision matrices whose rows are multiples of 16 bytes. Without such rows cuBLAS
// uses slow kernels: on an H100 they took 2.6 to 7.5 times as long.

#include <ATen/ATen.h>

#include <algorithm>

#include "torchkiln/kernels/matmul.h"
#include "torchkiln/torch/launch.h"

namespace torchkiln {

inline constexpr int64_t kRowBytes = 16;

/// Whether the elements of a column are adjacent in memory, and those of a row are not.
inline bool is_transposed(const at::Tensor& matrix) {
  return matrix.stride(0) == 1 && matrix.stride(1) != 1;
}

/// The alignment of all rows, in bytes: the largest power of two, at most 16, that divides their
/// length and addresses. The rows of a transposed matrix are its columns.
inline int64_t row_alignment(const at::Tensor& matrix) {
  if (is_transposed(matrix)) return row_alignment(matrix.t());
  const auto element = static_cast<int64_t>(matrix.element_size());
  int64_t all = kRowBytes | matrix.size(1) * element;
  if (matrix.stride(1) == 1)  // else torch copies the matrix
    all |= reinterpret_cast<intptr_t>(matrix.const_data_ptr()) | matrix.stride(0) * element;
  return all & -all;
}

/// Copies a matrix to another one with the same number of rows; additional columns become 0.
/// Torch's copy of unaligned rows reaches only half of the bandwidth.
inline void copy_rows(const char* op, const at::Tensor& from, const at::Tensor& to) {
  const int64_t columns = from.size(1), added = to.size(1) - columns;
  if (from.is_cuda() && from.element_size() == 2 && from.stride(1) == 1 && to.stride(1) == 1) {
    const CopyRows arguments{from.const_data_ptr(), to.data_ptr(), from.stride(0), to.stride(0),
                             from.size(0),          columns,       to.size(1)};
    launch(
        op, to, 0, 1, [&](auto stream) { return cuda::copy_rows(arguments, stream); },
        [](int64_t, int64_t) { return Status{}; });
    return;
  }
  if (added > 0) to.narrow(1, columns, added).zero_();
  to.narrow(1, 0, columns).copy_(from);
}

/// The matrix itself, or a copy with aligned rows and with zeros in added rows and columns. The
/// copy of a transposed matrix is transposed.
inline at::Tensor padded(const char* op, const at::Tensor& matrix, int64_t rows, int64_t columns) {
  const int64_t own_rows = matrix.size(0);
  const bool is_larger = rows > own_rows || columns > matrix.size(1);
  if (!is_larger && row_alignment(matrix) == kRowBytes) return matrix;
  if (is_transposed(matrix)) return padded(op, matrix.t(), columns, rows).t();
  at::Tensor copy = at::empty({rows, columns}, matrix.options());
  if (rows > own_rows) copy.narrow(0, own_rows, rows - own_rows).zero_();
  copy_rows(op, matrix, copy.narrow(0, 0, own_rows));
  return copy;
}

/// The sizes [m, n, k] of a product a b^T with a row-major result. A size is rounded up to a
/// multiple of 16 bytes if adjacent elements of a matrix lie along it.
struct PaddedSizes {
  int64_t m;
  int64_t n;
  int64_t k;

  PaddedSizes(const at::Tensor& a, const at::Tensor& b) {
    const auto lanes = kRowBytes / static_cast<int64_t>(a.element_size());
    const auto up = [lanes](int64_t size) { return (size + lanes - 1) / lanes * lanes; };
    m = is_transposed(a) ? up(a.size(0)) : a.size(0);
    n = up(b.size(0));
    k = is_transposed(a) && is_transposed(b) ? a.size(1) : up(a.size(1));
  }
};

/// Whether a product a b^T of padded copies takes less time, including the copies. The rates were
/// measured on an H100 with 50257, 30522 and 32001 columns, and are used for all GPUs.
inline bool gains_from_padding(const at::Tensor& a, const at::Tensor& b, const at::Tensor& out) {
  constexpr double kOddRate = 100e12, kEvenRate = 250e12, kAlignedRate = 650e12;  // FLOP/s
  constexpr double kSecondsPerElement = 1.4e-12, kSecondsOfLaunches = 20e-6;
  if (!a.is_cuda() || a.element_size() != 2) return false;
  const PaddedSizes sizes(a, b);
  int64_t alignment = kRowBytes;
  double copied = 0;
  const auto add = [&](const at::Tensor& matrix, int64_t rows, int64_t columns) {
    const int64_t own = row_alignment(matrix);
    alignment = std::min(alignment, own);
    if (own < kRowBytes || rows > matrix.size(0) || columns > matrix.size(1))
      copied += static_cast<double>(matrix.numel());
  };
  add(a, sizes.m, sizes.k);
  add(b, sizes.n, sizes.k);
  add(out, sizes.m, sizes.n);
  if (alignment == kRowBytes) return false;
  const double work = 2.0 * static_cast<double>(a.numel()) * static_cast<double>(b.size(0));
  const double rate = alignment == 2 ? kOddRate : kEvenRate;
  return work / rate > work / kAlignedRate + copied * kSecondsPerElement + kSecondsOfLaunches;
}

}  // namespace torchkiln
