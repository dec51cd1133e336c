#pragma once

// Declarations of batch norm: batch_norm.cpp has the op and its derivatives, kernel.cpp the checks
// and kernels. from_moments.cpp, pool.cpp and sync.cpp are other forms of the op, which share
// statistics.cpp.

#include "detail/composite_activations.h"
#include "torchkiln/kernels/batch_norm.h"
#include "torchkiln/torch/op.h"
#include "torchkiln/torch/written.h"

namespace torchkiln::batch_norm_ops {

using at::Tensor;
using Three = std::tuple<Tensor, Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;

/// The arguments of the op, and of its other forms.
struct Call {
  Borrowed<Tensor> x;
  Borrowed<MaybeTensor> weight;  // without one the factor is 1
  Borrowed<MaybeTensor> bias;    // without one, 0 is added
  Borrowed<MaybeTensor> running_mean;
  Borrowed<MaybeTensor> running_var;
  Borrowed<MaybeTensor> residual;
  Activation act;
  bool training;
  double momentum;
  double eps;
  bool updates;  // whether the op may update the running statistics
  const char* name = "bn_act";

  TORCHKILN_FIELDS(self.x, self.weight, self.bias, self.running_mean, self.running_var,
                   self.residual, self.act, self.training, self.momentum, self.eps);
};

/// Whether the channels of a dense tensor [outer, channels, ...] are adjacent in memory and the
/// tensor is not contiguous, as in channels_last.
bool channels_are_last(const Tensor& x);

/// Checks the arguments, but not the number of elements.
void check(const Call& call);

/// Checks all arguments.
void check_all(const Call& call);

/// Uninitialised outputs, see outputs().
Three empty_outputs(const Call& call, bool for_backward);

/// Checks the arguments and returns uninitialised outputs: y with the layout of x, and, if wanted,
/// the statistics and the signs for backward, else empty tensors.
Three outputs(const Call& call, bool for_backward);

inline void count_change(const MaybeTensor& running) {
  if (running) count_silent_change(*running);
}

/// Computes the outputs, and updates the running statistics in training.
Three run(const Call& call, bool for_backward);

/// The forward that also returns {y, statistics, signs} for backward.
template <bool may_update>
struct ForwardOp {
  struct Arguments : Call {
    void complete() { updates = may_update; }
  };
  static Three meta(const Arguments& call) { return outputs(call, /*for_backward=*/true); }
  static Three kernel(const Arguments& call) { return run(call, /*for_backward=*/true); }
};

struct Forward : ForwardOp<false> {
  static constexpr const char* kSchema =
      "torchkiln::_bn_act_forward(Tensor x, Tensor? weight, Tensor? bias, Tensor? running_mean, "
      "Tensor? running_var, Tensor? residual, str act, bool training, float momentum, float eps) "
      "-> (Tensor, Tensor, Tensor)";
};

/// Forward of a call that updates the running statistics.
struct UpdateForward : ForwardOp<true> {
  static constexpr const char* kSchema =
      "torchkiln::_bn_act_update_forward(Tensor x, Tensor? weight, Tensor? bias, "
      "Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor? residual, str act, "
      "bool training, float momentum, float eps) -> (Tensor, Tensor, Tensor)";
};

/// The arguments of backward; `statistics` and `signs` are results of forward.
struct Gradient {
  Borrowed<Tensor> grad;
  Borrowed<Tensor> x;
  Borrowed<Tensor> statistics;
  Borrowed<MaybeTensor> weight;
  Borrowed<MaybeTensor> bias;
  Borrowed<MaybeTensor> residual;
  Borrowed<MaybeTensor> signs;
  Activation act;
};

/// Checks the statistics that forward computed from x.
void check_statistics(const char* name, const Tensor& statistics, const Tensor& x);

void check_backward(const char* name, const Gradient& given);

/// Uninitialised gradients of x, weight, bias and the residual; empty tensors for gradients that
/// are not wanted.
Four empty_gradients(const Gradient& given, const std::array<bool, 4>& wanted);

/// Checks moments of x, [processes, 2 * channels + 1].
void check_moments(const char* name, const Tensor& moments, const Tensor& x);

/// Merges the moments of all processes into the statistics, [3, channels], and the elements per
/// channel, [1]. Moves the running statistics by the momentum, or by 1 / batches if that is given.
void merge_moments(const Call& call, const Tensor& moments, const MaybeTensor& batches,
                   const Tensor& statistics, const Tensor& count);

/// Computes y, and the signs if they are not empty, from the statistics.
void normalize(const Call& call, const Tensor& statistics, const Tensor& y, const Tensor& signs);

/// Returns y, connected to its inputs in the autograd graph. `outputs` are those of the forward.
Tensor recorded_outputs(const Three& outputs, const Call& call);

/// Computes y with torch's own ops.
Tensor composite_of(const Call& call);

class Operands;

/// The arguments of the kernels in training, without outputs. `grad` has the layout of x.
BatchNormBackward arguments_of(const Gradient& given, const Operands& operands, const Tensor& grad);

/// The wanted gradients of x, weight, bias and the residual. `second` is added to `grad`; this
/// requires the signs and the gradient of the residual.
struct Backward {
  using Wanted = std::array<bool, 4>;
  struct Arguments : Gradient {
    bool training;
    Wanted wanted;
    Borrowed<MaybeTensor> second;

    TORCHKILN_FIELDS(self.grad, self.x, self.statistics, self.weight, self.bias, self.residual,
                     self.signs, self.act, self.training, self.wanted, self.second);
  };
  static constexpr const char* kSchema =
      "torchkiln::_bn_act_backward(Tensor grad, Tensor x, Tensor statistics, Tensor? weight, "
      "Tensor? bias, Tensor? residual, Tensor? signs, str act, bool training, bool[4] wanted, "
      "Tensor? second=None) -> (Tensor, Tensor, Tensor, Tensor)";
  static Four meta(const Arguments& call);
  static Four kernel(const Arguments& call);
};

}  // namespace torchkiln::batch_norm_ops
