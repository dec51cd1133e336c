#pragma once

// A guard for products of half precision on a CPU with AMX, whose tiles are 32 deep. For a k that
// is no multiple of 32, torch's product (oneDNN, seen with torch 2.11 and 2.13) also reads up to 31
// elements behind each row of the left matrix and multiplies them by 0. The result is NaN if one is
// not finite: in the next row, or in memory that nobody has written.

#include <ATen/ATen.h>

#include <tuple>

namespace torchkiln {

inline bool has_amx() {
#ifdef __x86_64__
  static const bool found = __builtin_cpu_supports("amx-tile");
  return found;
#else
  return false;
#endif
}

/// The factors [..., m, k] and [..., k, n], with columns and rows of zeros where the product would
/// read behind the rows.
inline std::tuple<at::Tensor, at::Tensor> in_whole_tiles(const at::Tensor& a, const at::Tensor& b) {
  constexpr int64_t kDepth = 32;
  const int64_t added = (kDepth - a.size(-1) % kDepth) % kDepth;
  if (!a.is_cpu() || a.element_size() != 2 || added == 0 || a.size(-2) < 2 || a.stride(-1) != 1 ||
      !has_amx())
    return {a, b};
  return {at::constant_pad_nd(a, {0, added}), at::constant_pad_nd(b, {0, 0, 0, added})};
}

}  // namespace torchkiln
