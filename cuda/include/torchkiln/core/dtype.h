#pragma once

#include <cstddef>
#include <cstdint>

#include "torchkiln/core/status.h"

namespace torchkiln {

/// Element types that the kernels read and write.
enum class Dtype : int32_t { float32, float64, float16, bfloat16 };

constexpr size_t size_of(Dtype dtype) {
  return dtype == Dtype::float64 ? 8 : dtype == Dtype::float32 ? 4 : 2;
}

/// The Dtype of a C++ type. float16 and bfloat16 have different C++ types on the host and on the
/// device, so each side specialises this for its own types.
template <class T>
struct DtypeOf;
template <>
struct DtypeOf<float> {
  static constexpr Dtype value = Dtype::float32;
};
template <>
struct DtypeOf<double> {
  static constexpr Dtype value = Dtype::float64;
};

/// The type in which values of type T are computed. Results are rounded once, when they are stored.
template <class T>
struct ComputeOf {
  using type = float;
};
template <>
struct ComputeOf<double> {
  using type = double;
};
template <class T>
using Compute = typename ComputeOf<T>::type;

template <class T>
struct TypeTag {
  using type = T;
};

/// Calls body(TypeTag<T>{}) for the type T among Types whose Dtype is `dtype`.
template <class... Types, class Body>
Status dispatch(Dtype dtype, Body&& body) {
  Status status{"dtype not supported by this kernel"};
  (void)((DtypeOf<Types>::value == dtype && (status = body(TypeTag<Types>{}), true)) || ...);
  return status;
}

}  // namespace torchkiln
