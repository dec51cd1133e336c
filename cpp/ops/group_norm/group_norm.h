#pragma once

// Declarations for kernel.cpp (checks, kernels) and group_norm.cpp (the op, derivatives).

#include "detail/composite_activations.h"
#include "torchkiln/kernels/group_norm.h"
#include "torchkiln/torch/op.h"

namespace torchkiln::group_norm_ops {

using at::Tensor;
using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

/// The arguments of the op and of its forward.
struct Call {
  Borrowed<Tensor> x;
  int64_t num_groups;
  Borrowed<MaybeTensor> weight;  // without one the factor is 1
  Borrowed<MaybeTensor> bias;    // without one, 0 is added
  double eps;
  Activation act;

  TORCHKILN_FIELDS(self.x, self.num_groups, self.weight, self.bias, self.eps, self.act);
};

/// Checks the arguments and returns uninitialised outputs: y with the layout of x, and the
/// statistics for backward.
Two outputs(const Call& call);

/// Computes the outputs.
Two run(const Call& call);

/// The forward op whose results {y, statistics} backward needs.
struct Forward {
  static constexpr const char* kSchema =
      "torchkiln::_group_norm_forward(Tensor x, int num_groups, Tensor? weight, Tensor? bias, "
      "float eps, str act) -> (Tensor, Tensor)";
  static Two meta(const Call& call) { return outputs(call); }
  static Two kernel(const Call& call) { return run(call); }
};

/// Computes the wanted gradients of x, weight and bias.
struct Backward {
  using Wanted = std::array<bool, 3>;
  struct Arguments {
    Borrowed<Tensor> grad, x, statistics;
    int64_t num_groups;
    Borrowed<MaybeTensor> weight, bias;
    Activation act;
    Wanted wanted;

    TORCHKILN_FIELDS(self.grad, self.x, self.statistics, self.num_groups, self.weight, self.bias,
                     self.act, self.wanted);
  };
  static constexpr const char* kSchema =
      "torchkiln::_group_norm_backward(Tensor grad, Tensor x, Tensor statistics, int num_groups, "
      "Tensor? weight, Tensor? bias, str act, bool[3] wanted) -> (Tensor, Tensor, Tensor)";
  static Three meta(const Arguments& call);
  static Three kernel(const Arguments& call);
};

}  // namespace torchkiln::group_norm_ops
