#pragma once

// Weight and bias, for the forward and backward pass of norms on the CPU.

#include "detail/simd_row.h"
#include "torchkiln/kernels/norm.h"

namespace torchkiln::cpu::TORCHKILN_ISA {

/// Weight or bias; if there is none, the same number for all columns.
template <class W>
class PerColumn {
 public:
  using C = Compute<W>;

  PerColumn(const void* values, C otherwise)
      : values_(static_cast<const W*>(values)), otherwise_(Lanes<C>{} + otherwise) {}

  template <class Span>
  Lanes<C> load(int64_t i, Span span) const {
    return values_ == nullptr ? otherwise_ : load_lanes(values_ + i, span);
  }

 private:
  const W* values_;
  Lanes<C> otherwise_;
};

/// Calls body(TypeTag<T>{}, TypeTag<W>{}): T is the type of the rows, W that of weight and bias.
template <class Body>
Status dispatch_weighted(Dtype dtype, Dtype weight_dtype, const Body& body) {
  return dispatch_floating(dtype, [&](auto tag) {
    if constexpr (sizeof(typename decltype(tag)::type) == 2) {
      if (weight_dtype == Dtype::float32) return body(tag, TypeTag<float>{});
    }
    return body(tag, tag);
  });
}

}  // namespace torchkiln::cpu::TORCHKILN_ISA
