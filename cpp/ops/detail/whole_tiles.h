#pragma once

// A guard for products of half precision on a CPU with AMX, whose tiles are 32 deep. For a k that
// is no multiple of 32, torch's product (oneDNN, seen with torch 2.11 and 2.13) also reads up to 31
// elements after each row of the left matrix and multiplies them by 0. The result is NaN if one of
// these elements is not finite. They belong to the next row, or to uninitialised memory.

#include <ATen/ATen.h>
#ifdef __x86_64__
#include <cpuid.h>
#endif

#include <tuple>

namespace torchkiln {

inline bool has_amx() {
#ifdef __x86_64__
  // Reads CPUID itself, because __builtin_cpu_supports() of clang 16 does not support AMX.
  static const bool found = [] {
    constexpr unsigned kAmxTile = 1U << 24;
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & kAmxTile) != 0;
  }();
  return found;
#else
  return false;
#endif
}

/// The factors [..., m, k] and [..., k, n], with added columns and rows of zeros if the product
/// would read beyond the rows.
inline std::tuple<at::Tensor, at::Tensor> in_whole_tiles(const at::Tensor& a, const at::Tensor& b) {
  constexpr int64_t kDepth = 32;
  const int64_t added = (kDepth - a.size(-1) % kDepth) % kDepth;
  if (!a.is_cpu() || a.element_size() != 2 || added == 0 || a.size(-2) < 2 || a.stride(-1) != 1 ||
      !has_amx())
    return {a, b};
  return {at::constant_pad_nd(a, {0, added}), at::constant_pad_nd(b, {0, 0, 0, added})};
}

}  // namespace torchkiln
