#pragma once

// Arguments of two floating dtypes, and the casts that give them one dtype (kPromotedBy, op.h).

#include <ATen/ATen.h>

#include <array>
#include <optional>
#include <type_traits>
#include <utility>

#include "torchkiln/torch/call.h"
#include "torchkiln/torch/checks.h"
#include "torchkiln/torch/note.h"

namespace torchkiln::detail {

template <class Op>
using PromotedByOf = decltype(Op::kPromotedBy);
template <class Op>
using ReadsMixedOf = decltype(Op::kReadsMixed);

/// Whether the kernels read argument `index` of the op without a cast, if one argument has half
/// precision and another one float32.
template <class Op>
constexpr bool is_read_mixed(size_t index) {
  if constexpr (kHas<ReadsMixedOf, Op>) {
    for (const size_t each : Op::kReadsMixed)
      if (each == index) return true;
  }
  return false;
}

/// The casts that give arguments of two floating dtypes one dtype.
struct Promotion {
  at::ScalarType dtype = at::ScalarType::Undefined;
  bool reads_mixed = false;  // the arguments of kReadsMixed keep their dtypes

  template <class Op>
  bool casts(size_t index, at::ScalarType argument) const {
    return is_supported_dtype(argument) && c10::elementSize(argument) < c10::elementSize(dtype) &&
           !(reads_mixed && is_read_mixed<Op>(index));
  }
};

/// The promotion that a call needs; nullopt if no argument has to be cast. Arguments of a dtype
/// that the op's checks reject are not cast.
template <class Op, class... Args>
std::optional<Promotion> promotion_of(const Args&... args) {
  std::array<at::ScalarType, sizeof...(Args)> dtypes;
  size_t count = 0;
  const auto add = [&](const auto& value) {
    dtypes[count] = at::ScalarType::Undefined;
    for_each_tensor(
        [&](const at::Tensor& tensor) {
          if (tensor.defined()) dtypes[count] = tensor.scalar_type();
        },
        value);
    ++count;
  };
  (add(args), ...);
  const at::ScalarType left = dtypes[Op::kPromotedBy[0]], right = dtypes[Op::kPromotedBy[1]];
  if (left == right || !is_supported_dtype(left) || !is_supported_dtype(right)) return std::nullopt;
  const Promotion promotion{at::promote_types(left, right), is_mixed(left, right)};
  for (size_t i = 0; i < sizeof...(Args); ++i)
    if (promotion.casts<Op>(i, dtypes[i])) return promotion;
  return std::nullopt;
}

/// Argument `index` of an op, after the cast if `promotion` has one.
template <class Op, class T>
T promoted(size_t index, const T& value, const Promotion& promotion) {
  const auto cast = [&](const at::Tensor& tensor) {
    if (!promotion.casts<Op>(index, tensor.scalar_type())) return tensor;
    trace::note("cast: ", dtype_name(tensor.scalar_type()), " to ", dtype_name(promotion.dtype),
                ", the dtype of another argument");
    return tensor.to(promotion.dtype);
  };
  if constexpr (std::is_same_v<T, at::Tensor>) {
    return value.defined() ? cast(value) : value;
  } else if constexpr (std::is_same_v<T, MaybeTensor>) {
    return value ? MaybeTensor(cast(*value)) : value;
  } else {
    return value;
  }
}

/// Calls body(args...) with the promoted arguments.
template <class Op, class Body, size_t... I, class... Args>
decltype(auto) with_promoted(const Promotion& promotion, const Body& body,
                             std::index_sequence<I...>, const Args&... args) {
  return body(promoted<Op>(I, args, promotion)...);
}

}  // namespace torchkiln::detail
