#pragma once

// Windows of a max pool over pixels with adjacent channels: the pixels of a window, and the windows
// that contain a pixel.

#include "choose_pool.h"
#include "factors.cuh"

namespace torchkiln::cuda {
namespace {

/// One dimension of the windows. kKernel and kStride are 0 if they are known only at run time.
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
  /// Calls use(window, index of the pixel within the window) for each window that contains the
  /// pixel.
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

/// The windows of an image, and the rows and columns of the positions that a kernel visits.
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

/// The grid for a kernel that visits the positions in `walked`.
template <class Windows>
Windows make_grid_of(const PoolWindows& windows, const WalkExtent& walked) {
  const auto axis = [&](int d, int64_t size, int64_t pooled) {
    return typename Windows::Axis{
        windows.kernel[d], Divisor(static_cast<uint32_t>(windows.stride[d])), windows.padding[d],
        static_cast<int>(size), static_cast<int>(pooled)};
  };
  return {
      axis(0, windows.height, windows.pooled_height), axis(1, windows.width, windows.pooled_width),
      Divisor(static_cast<uint32_t>(walked.columns)), Divisor(static_cast<uint32_t>(walked.rows))};
}

/// Calls body(grid type, activation), with constants for the windows that are compiled into
/// kernels, else with a grid of any windows.
template <class T, class Body>
Status with_windows(int fixed_window, Activation activation, const Body& body) {
  using Math = MathFor<T>;
  const FixedActivation<Relu, Math> relu{};
  if (fixed_window == 3) return body(WindowGrid<3, 2>{}, relu);
  if (fixed_window == 2) return body(WindowGrid<2, 2>{}, relu);
  return body(WindowGrid<0, 0>{}, SelectedActivation<Math>{activation});
}

}  // namespace
}  // namespace torchkiln::cuda
