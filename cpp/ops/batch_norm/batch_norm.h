#pragma once

// Declarations of batch norm. batch_norm.cpp has the op and its derivatives, kernel.cpp the checks
// and kernels. from_moments.cpp, pool.cpp and sync.cpp have other forms of the op, which share
// statistics.cpp.

#include "detail/composite_activations.h"
#include "torchkiln/kernels/batch_norm.h"
#include "torchkiln/torch/op.h"
#include "torchkiln/torch/written.h"

namespace torchkiln::batch_norm_ops {

using at::Tensor;
using Three = std::tuple<Tensor, Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;

/// The arguments of the op and of its other forms.
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

/// Whether a tensor [outer, channels, ...] is dense with adjacent channels, as in channels_last,
/// and not contiguous.
bool channels_are_last(const Tensor& x);

/// Checks the arguments, except the number of elements.
void check(const Call& call);

/// Checks all arguments.
void check_all(const Call& call);

/// The outputs, uninitialised and without checks: see outputs().
Three empty_outputs(const Call& call, bool for_backward);

/// Checks the arguments and returns uninitialised outputs: y with the layout of x and, if wanted
/// for backward, the statistics and the signs. Results that are not wanted are empty tensors.
Three outputs(const Call& call, bool for_backward);

inline void count_change(const MaybeTensor& running) {
  if (running) count_silent_change(*running);
}

/// Computes the outputs, and in training updates the running statistics.
Three run(const Call& call, bool for_backward);

/// The forward op whose results {y, statistics, signs} backward needs.
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

/// The forward op that also updates the running statistics.
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

/// Merges the moments of all processes into `statistics`, [3, channels], and the elements per
/// channel into `count`, [1]. Moves the running statistics by 1 / batches if `batches` is given,
/// else by the momentum.
void merge_moments(const Call& call, const Tensor& moments, const MaybeTensor& batches,
                   const Tensor& statistics, const Tensor& count);

/// Computes y, and the signs if they are not empty, from the statistics.
void normalize(const Call& call, const Tensor& statistics, const Tensor& y, const Tensor& signs);

/// Returns y with a node in the autograd graph. `outputs`: the results of forward.
Tensor recorded_outputs(const Three& outputs, const Call& call);

/// Computes y with torch's own ops.
Tensor composite_of(const Call& call);

class Operands;

/// The arguments of the kernels in training, except the outputs. `grad` has the layout of x.
BatchNormBackward arguments_of(const Gradient& given, const Operands& operands, const Tensor& grad);

/// Computes the wanted gradients of x, weight, bias and the residual. If `second` is given, the
/// incoming gradient is grad + second; this requires the signs and the gradient of the residual.
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
