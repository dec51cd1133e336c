#pragma once

// The moments of runs of elements, for forward of batch norm and group norm on the CPU.

#include "batch_norm/common.h"

namespace torchkiln::cpu::TORCHKILN_ISA {

/// The moments of numbers: count, mean, and sum of squared distances from the mean.
struct Moments {
  double count;
  double mean;
  double squares;
};

/// The moments of numbers from sums of their distances from `origin`, which is one of them. With
/// distances the sum of squares loses few digits if the mean is far from 0.
inline Moments moments_of(double count, double origin, double sum, double squares) {
  const double from_origin = sum / count;
  return {count, origin + from_origin, std::max(squares - sum * from_origin, squares * 0)};
}

/// Merges the moments of two sets of numbers. The sum of squares grows by the squared distance of
/// their means times n1 n2 / (n1 + n2).
inline Moments merged(const Moments& a, const Moments& b) {
  if (a.count == 0) return b;
  const double count = a.count + b.count;
  const double distance = b.mean - a.mean;
  const double share = b.count / count;
  return {count, a.mean + distance * share,
          a.squares + b.squares + distance * distance * share * a.count};
}

/// The moments of a run in double, from distances from its first element.
template <class C>
Moments exact_moments(const C* x, int64_t count) {
  double sums[kSums] = {}, squares[kSums] = {};
  const auto origin = static_cast<double>(x[0]);
  add_run(sums, squares, true, count, [&](int64_t i) {
    const double distance = static_cast<double>(x[i]) - origin;
    return Pair<double>{distance, distance * distance};
  });
  return moments_of(static_cast<double>(count), origin, total_of(sums), total_of(squares));
}

/// The moments of a run. With distances from the run's own mean, sums in float lose few digits.
template <class C>
Moments run_moments(const C* x, int64_t count) {
  if constexpr (std::is_same_v<C, float>) {
    double total[1], of_distances[2];
    sum_lanes<C>(total, count,
                 [&](int64_t i, auto part, auto& sums) { sums[0] += load_lanes(x + i, part); });
    const C middle = static_cast<C>(total[0] / static_cast<double>(count));
    sum_lanes<C>(of_distances, count, [&](int64_t i, auto part, auto& sums) {
      const Lanes<C> distance = within<C>(load_lanes(x + i, part) - middle, part);
      sums[0] += distance;
      sums[1] += distance * distance;
    });
    // Float has too small a range for the squares of other numbers.
    if (of_distances[1] > 1e-30 && of_distances[1] < 1e37) {
      return moments_of(static_cast<double>(count), static_cast<double>(middle), of_distances[0],
                        of_distances[1]);
    }
  }
  return exact_moments(x, count);
}

}  // namespace torchkiln::cpu::TORCHKILN_ISA
