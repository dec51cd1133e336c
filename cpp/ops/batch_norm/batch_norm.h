#pragma once

// Declarations shared by kernel.cpp (checks, kernels) and batch_norm.cpp (the op, derivatives).

#include "detail/composite_activations.h"
#include "torchkiln/kernels/batch_norm.h"
#include "torchkiln/torch/op.h"
#include "torchkiln/torch/written.h"

namespace torchkiln::batch_norm_ops {

using at::Tensor;
using Three = std::tuple<Tensor, Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;

/// The arguments of the op.
struct Call {
  const Tensor& x;
  const MaybeTensor& weight;  // without one the factor is 1
  const MaybeTensor& bias;    // without one, 0 is added
  const MaybeTensor& running_mean;
  const MaybeTensor& running_var;
  const MaybeTensor& residual;
  Activation act;
  bool training;
  double momentum;
  double eps;
  bool updates;  // whether the op may update the running statistics
  const char* name = "bn_act";
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
template <bool updates>
struct ForwardOp {
  static constexpr bool kUpdates = updates;

  static Three meta(const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias,
                    const MaybeTensor& running_mean, const MaybeTensor& running_var,
                    const MaybeTensor& residual, Activation act, bool training, double momentum,
                    double eps) {
    return outputs({x, weight, bias, running_mean, running_var, residual, act, training, momentum,
                    eps, updates},
                   /*for_backward=*/true);
  }
  static Three kernel(const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias,
                      const MaybeTensor& running_mean, const MaybeTensor& running_var,
                      const MaybeTensor& residual, Activation act, bool training, double momentum,
                      double eps) {
    return run({x, weight, bias, running_mean, running_var, residual, act, training, momentum, eps,
                updates},
               /*for_backward=*/true);
  }
};

struct Forward : ForwardOp<false> {
  static constexpr const char* kSchema =
      "torchkiln::bn_act_forward(Tensor x, Tensor? weight, Tensor? bias, Tensor? running_mean, "
      "Tensor? running_var, Tensor? residual, str act, bool training, float momentum, float eps) "
      "-> (Tensor, Tensor, Tensor)";
};

/// Forward of a call that updates the running statistics.
struct UpdateForward : ForwardOp<true> {
  static constexpr const char* kSchema =
      "torchkiln::bn_act_update_forward(Tensor x, Tensor? weight, Tensor? bias, "
      "Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor? residual, str act, "
      "bool training, float momentum, float eps) -> (Tensor, Tensor, Tensor)";
};

/// The arguments of backward; the forward has made `statistics` and `signs`.
struct Gradient {
  const Tensor& grad;
  const Tensor& x;
  const Tensor& statistics;
  const MaybeTensor& weight;
  const MaybeTensor& bias;
  const MaybeTensor& residual;
  const MaybeTensor& signs;
};

/// Checks the statistics that the forward made of x.
void check_statistics(const char* name, const Tensor& statistics, const Tensor& x);

void check_backward(const char* name, const Gradient& given);

/// Uninitialised gradients of x, weight, bias and the residual; empty tensors for those not wanted.
Four empty_gradients(const Gradient& given, const std::array<bool, 4>& wanted);

/// The running statistics that a call moves: by `momentum`, or by 1 / batches if that is given.
struct Running {
  const MaybeTensor& mean;
  const MaybeTensor& var;
  const MaybeTensor& batches;
  double momentum;
};

/// Checks moments of x, [processes, 2 * channels + 1].
void check_moments(const char* name, const Tensor& moments, const Tensor& x);

/// Merges the moments of all processes into the statistics, [3, channels], and their count, [1].
void merge_moments(const char* name, const Tensor& x, const Tensor& moments, const Running& moved,
                   double eps, const Tensor& statistics, const Tensor& count);

/// Computes y, and the signs if they are not empty, from the statistics.
void normalize(const char* name, const Tensor& x, const Tensor& statistics,
               const MaybeTensor& weight, const MaybeTensor& bias, const MaybeTensor& residual,
               Activation act, const Tensor& y, const Tensor& signs);

/// Settings of a call that backward needs beside the saved tensors.
struct Settings {
  Activation act;
  bool training;
  double eps;
  bool has_residual;
  bool channels_last;  // channels_are_last() of x
};

/// Returns y, connected to its inputs in the autograd graph. `outputs` are those of the forward.
Tensor recorded_outputs(const Three& outputs, const Tensor& x, const MaybeTensor& weight,
                        const MaybeTensor& bias, const MaybeTensor& residual,
                        const Settings& settings);

/// Computes y with torch's own ops.
Tensor composite_of(const Call& call);

class Operands;

/// The arguments of the kernels in training, without outputs. `grad` has the layout of x.
BatchNormBackward arguments_of(const Gradient& given, const Operands& operands, const Tensor& grad,
                               Activation act);

/// The wanted gradients of x, weight, bias and the residual. `second` is added to `grad`, which
/// needs the signs and the gradient of the residual.
struct Backward {
  using Wanted = std::array<bool, 4>;
  static constexpr const char* kSchema =
      "torchkiln::bn_act_backward(Tensor grad, Tensor x, Tensor statistics, Tensor? weight, "
      "Tensor? bias, Tensor? residual, Tensor? signs, str act, bool training, bool[4] wanted, "
      "Tensor? second=None) -> (Tensor, Tensor, Tensor, Tensor)";
  static Four meta(const Tensor& grad, const Tensor& x, const Tensor& statistics,
                   const MaybeTensor& weight, const MaybeTensor& bias, const MaybeTensor& residual,
                   const MaybeTensor& signs, Activation act, bool training, Wanted wanted,
                   const MaybeTensor& second);
  static Four kernel(const Tensor& grad, const Tensor& x, const Tensor& statistics,
                     const MaybeTensor& weight, const MaybeTensor& bias,
                     const MaybeTensor& residual, const MaybeTensor& signs, Activation act,
                     bool training, Wanted wanted, const MaybeTensor& second);
};

}  // namespace torchkiln::batch_norm_ops
