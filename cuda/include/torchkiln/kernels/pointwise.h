#pragma once

#include "torchkiln/core/layout.h"

struct CUstream_st;

namespace torchkiln {

/// A copy of transposed matrices: to[matrix][row][column] = from[matrix * matrix_stride +
/// column * column_stride + row], where `to` is contiguous.
struct Transpose {
  static constexpr int64_t kSide = 64;  // most rows and columns of a tile

  const void* from;
  void* to;
  Dtype dtype;
  int64_t matrices, rows, columns;
  int64_t matrix_stride, column_stride;  // elements of `from`

  int64_t tiles() const {
    return matrices * ((rows + kSide - 1) / kSide) * ((columns + kSide - 1) / kSide);
  }
};

namespace cpu {

/// out[i] = a[i] + b[i] for begin <= i < end. Ranges may run on different threads.
TORCHKILN_EXPORT Status add(const Elementwise<2>& arguments, int64_t begin, int64_t end);

// a * b + c is four functions, because each operand may be a tensor or a number.

/// out[i] = a[i] * b[i] + c[i] for begin <= i < end
TORCHKILN_EXPORT Status multiply_add(const Elementwise<3>& arguments, int64_t begin, int64_t end);
/// x * factor + c; the inputs are {x, c}
TORCHKILN_EXPORT Status scale_add(const Elementwise<2>& arguments, double factor, int64_t begin,
                                  int64_t end);
/// a * b + shift; the inputs are {a, b}
TORCHKILN_EXPORT Status multiply_shift(const Elementwise<2>& arguments, double shift, int64_t begin,
                                       int64_t end);
TORCHKILN_EXPORT Status scale_shift(const Elementwise<1>& arguments, double factor, double shift,
                                    int64_t begin, int64_t end);
/// x * factor / divisor for numbers of the compute type in memory; 0 if the divisor is 0. A null
/// divisor is 1.
TORCHKILN_EXPORT Status scale_by(const Elementwise<1>& arguments, const void* factor,
                                 const void* divisor, int64_t begin, int64_t end);
/// The gradients {grad * b, grad * a}; the inputs are {grad, a, b}.
TORCHKILN_EXPORT Status multiply_gradient(const Elementwise<3, 2>& arguments, int64_t begin,
                                          int64_t end);

/// Copies the tiles begin <= tile < end.
TORCHKILN_EXPORT Status transpose(const Transpose& arguments, int64_t begin, int64_t end);

}  // namespace cpu

namespace cuda {

/// The functions of namespace cpu on the current device, queued on `stream`.
TORCHKILN_EXPORT Status add(const Elementwise<2>& arguments, CUstream_st* stream);
TORCHKILN_EXPORT Status multiply_add(const Elementwise<3>& arguments, CUstream_st* stream);
TORCHKILN_EXPORT Status scale_add(const Elementwise<2>& arguments, double factor,
                                  CUstream_st* stream);
TORCHKILN_EXPORT Status multiply_shift(const Elementwise<2>& arguments, double shift,
                                       CUstream_st* stream);
TORCHKILN_EXPORT Status scale_shift(const Elementwise<1>& arguments, double factor, double shift,
                                    CUstream_st* stream);
TORCHKILN_EXPORT Status scale_by(const Elementwise<1>& arguments, const void* factor,
                                 const void* divisor, CUstream_st* stream);
TORCHKILN_EXPORT Status multiply_gradient(const Elementwise<3, 2>& arguments, CUstream_st* stream);

}  // namespace cuda
}  // namespace torchkiln
