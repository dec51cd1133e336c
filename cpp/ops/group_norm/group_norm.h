#pragma once

// Declarations shared by kernel.cpp (checks, kernels) and group_norm.cpp (the op, derivatives).

#include "detail/composite_activations.h"
#include "torchkiln/kernels/group_norm.h"
#include "torchkiln/torch/op.h"

namespace torchkiln::group_norm_ops {

using at::Tensor;
using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

/// The arguments of the op.
struct Call {
  const Tensor& x;
  int64_t num_groups;
  const MaybeTensor& weight;  // without one the factor is 1
  const MaybeTensor& bias;    // without one, 0 is added
  double eps;
  Activation act;
};

/// Checks the arguments and returns uninitialised outputs: y with the layout of x, and the
/// statistics for backward.
Two outputs(const Call& call);

/// Computes the outputs.
Two run(const Call& call);

/// The forward that also returns {y, statistics} for backward.
struct Forward {
  static constexpr const char* kSchema =
      "torchkiln::group_norm_forward(Tensor x, int num_groups, Tensor? weight, Tensor? bias, "
      "float eps, str act) -> (Tensor, Tensor)";
  static Two meta(const Tensor& x, int64_t num_groups, const MaybeTensor& weight,
                  const MaybeTensor& bias, double eps, Activation act) {
    return outputs({x, num_groups, weight, bias, eps, act});
  }
  static Two kernel(const Tensor& x, int64_t num_groups, const MaybeTensor& weight,
                    const MaybeTensor& bias, double eps, Activation act) {
    return run({x, num_groups, weight, bias, eps, act});
  }
};

/// The wanted gradients of x, weight and bias.
struct Backward {
  using Wanted = std::array<bool, 3>;
  static constexpr const char* kSchema =
      "torchkiln::group_norm_backward(Tensor grad, Tensor x, Tensor statistics, int num_groups, "
      "Tensor? weight, Tensor? bias, str act, bool[3] wanted) -> (Tensor, Tensor, Tensor)";
  static Three meta(const Tensor& grad, const Tensor& x, const Tensor& statistics,
                    int64_t num_groups, const MaybeTensor& weight, const MaybeTensor& bias,
                    Activation act, Wanted wanted);
  static Three kernel(const Tensor& grad, const Tensor& x, const Tensor& statistics,
                      int64_t num_groups, const MaybeTensor& weight, const MaybeTensor& bias,
                      Activation act, Wanted wanted);
};

}  // namespace torchkiln::group_norm_ops
