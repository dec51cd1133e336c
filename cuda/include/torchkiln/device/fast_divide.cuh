#pragma once

#include <cstdint>

#include "torchkiln/device/device.h"

namespace torchkiln::device {

/// Divides numbers below 2^31 by a divisor that is set on the host, with a multiplication and a
/// shift instead of some 20 instructions. With l = ceil(log2 d),
///   n / d = n * (floor(2^(31 + l) / d) + 1) >> (31 + l) for every such n.
class Divisor {
 public:
  Divisor() = default;

  explicit Divisor(uint32_t divisor) : divisor_(divisor) {
    uint32_t log2 = 0;
    while ((uint64_t{1} << log2) < divisor) ++log2;
    if (divisor < 2) return;
    multiplier_ = static_cast<uint32_t>((uint64_t{1} << (31 + log2)) / divisor + 1);
    shift_ = log2 - 1;
  }

#ifdef __CUDACC__
  __device__ __forceinline__ uint32_t quotient(uint32_t n) const {
    return divisor_ < 2 ? n : quotient_above_1(n);
  }
  /// quotient() for a divisor of at least 2, without a test for a divisor of 1.
  __device__ __forceinline__ uint32_t quotient_above_1(uint32_t n) const {
    return __umulhi(n, multiplier_) >> shift_;
  }
#endif

  TORCHKILN_HOST_DEVICE uint32_t divisor() const { return divisor_; }

 private:
  uint32_t divisor_ = 1;
  uint32_t multiplier_ = 0;
  uint32_t shift_ = 0;
};

}  // namespace torchkiln::device
