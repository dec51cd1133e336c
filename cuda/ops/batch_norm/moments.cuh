#pragma once

namespace torchkiln::cuda {

/// Count, mean and sum of the squared distances to the mean.
struct Moments {
  double count;
  double mean;
  double squares;

  /// From sums of the distances to `origin`, one of the numbers.
  static __device__ __forceinline__ Moments from_sums(double count, double origin, double sum,
                                                      double squares) {
    if (count == 0) return {};
    const double from_origin = sum / count;
    const double rest = squares - sum * from_origin;
    return {count, origin + from_origin, rest < 0 ? 0 : rest};
  }

  /// Adds another set: the squared distance of the means, times n1 n2 / (n1 + n2), is added to the
  /// sum of squares.
  __device__ __forceinline__ void merge(const Moments& other) {
    if (other.count == 0) return;
    const double all = count + other.count;
    const double distance = other.mean - mean;
    const double share = other.count / all;
    squares += other.squares + distance * distance * share * count;
    mean = count == 0 ? other.mean : mean + distance * share;
    count = all;
  }
};

}  // namespace torchkiln::cuda
