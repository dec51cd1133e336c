#pragma once

// Reductions over the lanes of a warp, by shuffles. Includes one short header, so that
// torchkiln.jit compiles this file in milliseconds.

#include "torchkiln/device/device.h"

namespace torchkiln::device {

/// Reduction operator: the sum of two numbers.
struct Sum {
  template <class C>
  static __device__ __forceinline__ C identity() {
    return C(0);
  }
  template <class C>
  __device__ __forceinline__ C operator()(C a, C b) const {
    return a + b;
  }
};

/// Reduction operator: the maximum of two numbers; NaN only if both are NaN.
struct Max {
  template <class C>
  static __device__ __forceinline__ C identity() {
    return C(__int_as_float(0xff800000));  // minus infinity: NVRTC has no INFINITY
  }
  template <class C>
  __device__ __forceinline__ C operator()(C a, C b) const {
    return fmax(a, b);
  }
};

// An operator has identity() and combines two numbers, as Sum does, or has clear() and combines two
// arrays. combine() and clear() below support both.

/// Sets a = op(a, b).
template <class Op, class C, int N>
__device__ __forceinline__ auto combine(const Op& op, C (&a)[N], const C (&b)[N], int)
    -> decltype(static_cast<void>(op(a[0], b[0]))) {
#pragma unroll
  for (int i = 0; i < N; ++i) a[i] = op(a[i], b[i]);
}
template <class Op, class C, int N>
__device__ __forceinline__ void combine(const Op& op, C (&a)[N], const C (&b)[N], long) {
  op(a, b);
}

/// Sets a to the identity of the operator.
template <class Op, class C, int N>
__device__ __forceinline__ auto clear(const Op&, C (&a)[N], int)
    -> decltype(static_cast<void>(Op::template identity<C>())) {
#pragma unroll
  for (int i = 0; i < N; ++i) a[i] = Op::template identity<C>();
}
template <class Op, class C, int N>
__device__ __forceinline__ void clear(const Op&, C (&a)[N], long) {
  Op::clear(a);
}

/// One step of a reduction: combines the values of lanes whose indices differ by `offset`.
template <class C, int N, class Op>
__device__ __forceinline__ void exchange(C (&values)[N], int offset, const Op& op) {
  C others[N];
#pragma unroll
  for (int i = 0; i < N; ++i) others[i] = __shfl_xor_sync(~0u, values[i], offset);
  combine(op, values, others, 0);
}

/// Combines values[i] over groups of `lanes` adjacent lanes, a power of two; each lane gets the
/// results. All 32 lanes must call it.
template <class C, int N, class Op>
__device__ __forceinline__ void reduce_warp(C (&values)[N], const Op& op, int lanes = kWarpLanes) {
  for (int offset = lanes / 2; offset > 0; offset /= 2) exchange(values, offset, op);
}

template <class C, class Op = Sum>
__device__ __forceinline__ C reduce_warp(C value, const Op& op = {}, int lanes = kWarpLanes) {
  C values[1] = {value};
  reduce_warp(values, op, lanes);
  return values[0];
}

}  // namespace torchkiln::device
