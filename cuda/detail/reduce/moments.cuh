#pragma once

namespace torchkiln::reduce {

/// The moments of numbers: count, mean, and sum of the squared distances from the mean.
struct Moments {
  double count;
  double mean;
  double squares;

  /// Moments from two sums: of the distances from `origin`, and of their squares. `origin` is one
  /// of the numbers.
  static __device__ __forceinline__ Moments from_sums(double count, double origin, double sum,
                                                      double squares) {
    if (count == 0) return {};
    const double from_origin = sum / count;
    const double rest = squares - sum * from_origin;
    return {count, origin + from_origin, rest < 0 ? 0 : rest};
  }
};

}  // namespace torchkiln::reduce
