#pragma once

// Windows of a max pool over pixels with adjacent channels: which pixels a window has, and which
// windows a pixel belongs to.

#include <utility>

#include "factors.cuh"

namespace torchkiln::cuda {
namespace {

/// One dimension of the windows. kKernel and kStride are known at compile time, or 0.
template <int kKernel, int kStride>
struct WindowAxis {
  static constexpr int kWidth = kKernel;
  static constexpr int kStep = kStride;
  int kernel_;
  Divisor stride_;
  int padding;
  int size;    // pixels
  int pooled;  // windows

  __device__ __forceinline__ int kernel() const { return kKernel > 0 ? kKernel : kernel_; }
  __device__ __forceinline__ int stride() const {
    return kStride > 0 ? kStride : static_cast<int>(stride_.divisor());
  }
  /// The first pixel of a window or block; negative in the padding.
  __device__ __forceinline__ int begin(int window) const { return window * stride() - padding; }
  __device__ __forceinline__ bool has(int pixel) const {
    return static_cast<unsigned>(pixel) < static_cast<unsigned>(size);
  }
  __device__ __forceinline__ bool has_window(int window) const {
    return static_cast<unsigned>(window) < static_cast<unsigned>(pooled);
  }
  /// Calls use(window, place of the pixel in it) for each window that has a pixel.
  template <class Use>
  __device__ __forceinline__ void each_window(int pixel, const Use& use) const {
    const auto from = static_cast<unsigned>(pixel + padding);
    int window = static_cast<int>(stride_.quotient(from));
    for (int place = static_cast<int>(from) - window * stride(); window >= 0 && place < kernel();
         --window, place += stride()) {
      if (window < pooled) use(window, place);
    }
  }
};

/// The positions that a kernel visits, one per step.
enum class Walk {
  windows,
  pixels,
  /// Blocks of stride x stride pixels, which begin at the first pixel of a window.
  blocks,
};

/// The windows of an image, and the rows and columns of what a kernel walks over.
template <int kKernel, int kStride>
struct WindowGrid {
  using Axis = WindowAxis<kKernel, kStride>;
  static constexpr bool kIsFixed = kKernel > 0;
  Axis rows;
  Axis columns;
  Divisor row_length;
  Divisor row_count;

  struct Place {
    int64_t image;
    int row;
    int column;
  };
  __device__ __forceinline__ Place place(uint32_t index) const {
    const uint32_t row = row_length.quotient(index), image = row_count.quotient(row);
    return {image, static_cast<int>(row - image * row_count.divisor()),
            static_cast<int>(index - row * row_length.divisor())};
  }
  __device__ __forceinline__ int64_t pixels() const { return int64_t{rows.size} * columns.size; }
  __device__ __forceinline__ int64_t pooled() const {
    return int64_t{rows.pooled} * columns.pooled;
  }
};

/// The grid for a walk, and its length.
template <class Windows>
std::pair<Windows, int64_t> make_walk(const PoolWindows& windows, Walk over) {
  const auto axis = [&](int d, int64_t size, int64_t pooled) {
    return typename Windows::Axis{
        windows.kernel[d], Divisor(static_cast<uint32_t>(windows.stride[d])), windows.padding[d],
        static_cast<int>(size), static_cast<int>(pooled)};
  };
  const auto extent = [&](int d, int64_t size, int64_t pooled) {
    if (over == Walk::windows) return pooled;
    return over == Walk::pixels ? size : ceil_div(size + windows.padding[d], windows.stride[d]);
  };
  const int64_t rows = extent(0, windows.height, windows.pooled_height);
  const int64_t columns = extent(1, windows.width, windows.pooled_width);
  return {
      {axis(0, windows.height, windows.pooled_height), axis(1, windows.width, windows.pooled_width),
       Divisor(static_cast<uint32_t>(columns)), Divisor(static_cast<uint32_t>(rows))},
      windows.images * rows * columns};
}

/// Calls body(grid type, activation): windows of 3 x 3 and 2 x 2 at every other pixel with relu are
/// compiled into kernels.
template <class T, class Body>
Status with_windows(const PoolWindows& windows, Activation activation, const Body& body) {
  using Math = MathFor<T>;
  const auto is = [&](int kernel, int stride) {
    return windows.kernel[0] == kernel && windows.kernel[1] == kernel &&
           windows.stride[0] == stride && windows.stride[1] == stride;
  };
  if (activation == kActivation<Relu>) {
    const FixedActivation<Relu, Math> relu{};
    if (is(3, 2)) return body(WindowGrid<3, 2>{}, relu);
    if (is(2, 2)) return body(WindowGrid<2, 2>{}, relu);
  }
  return body(WindowGrid<0, 0>{}, SelectedActivation<Math>{activation});
}

}  // namespace
}  // namespace torchkiln::cuda
