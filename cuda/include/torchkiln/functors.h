#pragma once

// The scalar formulas, each written once: g++ compiles them for the CPU loops, nvcc (and NVRTC) for
// the kernels. They are templates over the type that is computed in, never over the type that is
// stored.

#ifdef __CUDACC__
#define TORCHKILN_FUNCTION __host__ __device__ __forceinline__
#else
// Forced, because the CPU loops are compiled for several instruction sets: an out-of-line copy made
// for a wide one could be picked by the linker for all of them.
#define TORCHKILN_FUNCTION inline __attribute__((always_inline))
#endif

namespace torchkiln {

struct Add {
  template <class C>
  TORCHKILN_FUNCTION C operator()(C a, C b) const {
    return a + b;
  }
};

/// max(z, 0); NaN goes through, and -0 becomes +0.
struct Relu {
  template <class C>
  TORCHKILN_FUNCTION static C value(C z) {
    return z <= C(0) ? C(0) : z;
  }

  /// d relu / dz * grad, from the output: what is saved is what the next op holds on to anyway.
  template <class C>
  TORCHKILN_FUNCTION static C gradient(C grad, C output) {
    return output <= C(0) ? C(0) : grad;
  }
};

/// activation(x * scale + bias)
template <class Activation, class C>
struct ScaleBias {
  C scale;

  TORCHKILN_FUNCTION C operator()(C x, C bias) const { return Activation::value(x * scale + bias); }
};

/// The gradient for x of activation(x * scale + bias), from the gradient and the output.
template <class Activation, class C>
struct ScaledGradient {
  C scale;

  TORCHKILN_FUNCTION C operator()(C grad, C output) const {
    return Activation::gradient(grad, output) * scale;
  }
};

}  // namespace torchkiln
