#pragma once

// cross_entropy() of the outputs of a linear layer, a chunk of rows at a time. Forward computes the
// logits of a chunk and, if gradients are wanted, replaces them at once by the gradient of the sum
// of the losses, from which it makes those of x, weight and bias. Backward multiplies them by a
// number. Losses per row have a gradient each, which no later factor can stand for: their backward
// computes the chunks again.
//
// Declarations shared by linear_cross_entropy_kernel.cpp (checks, kernels) and
// linear_cross_entropy.cpp (the op, derivatives).

#include "cross_entropy/linear_chunks.h"
#include "torchkiln/torch/op.h"

namespace torchkiln::linear_cross_entropy_ops {

using at::Tensor;
using MaybeDtype = std::optional<at::ScalarType>;
using Three = std::tuple<Tensor, Tensor, Tensor>;
using Five = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
using Wanted = std::array<bool, 3>;  // the gradients of x, weight and bias

inline constexpr const char* kName = "linear_cross_entropy";

/// The arguments of a call.
struct Call {
  LogitLayer layer;  // x of any shape
  Tensor target;
  LossCall loss;
  MaybeDtype dtype;
  bool check_target;

  c10::SymInt rows() const { return target.sym_numel(); }
  at::ScalarType loss_dtype() const { return dtype.value_or(layer.x.scalar_type()); }
};

inline Call as_call(const Tensor& x, const Tensor& weight, const Tensor& target,
                    const MaybeTensor& bias, const MaybeTensor& class_weight, int64_t ignore_index,
                    LossReduction reduction, double label_smoothing, double z_loss,
                    MaybeDtype dtype, bool check_target, std::optional<double> softcap,
                    double temperature) {
  return {{x, weight, bias, softcap, temperature},
          target,
          {class_weight, ignore_index, reduction, label_smoothing, z_loss},
          dtype,
          check_target};
}

/// Adapts a function on a Call, and further arguments, to the arguments of the op.
template <auto function, class... More>
auto of_call(const Tensor& x, const Tensor& weight, const Tensor& target, const MaybeTensor& bias,
             const MaybeTensor& class_weight, int64_t ignore_index, LossReduction reduction,
             double label_smoothing, double z_loss, MaybeDtype dtype, bool check_target,
             std::optional<double> softcap, double temperature, More... more) {
  return function(as_call(x, weight, target, bias, class_weight, ignore_index, reduction,
                          label_smoothing, z_loss, dtype, check_target, softcap, temperature),
                  more...);
}

void check(const char* op, const Call& call);
void check_classes_if_asked(const Call& call);

/// The loss, the state of each row and the gradients of the sum of the losses. The state is that of
/// cross_entropy(): see state_size().
Five forward_outputs(const Call& call, Wanted wanted, bool accuracy);
Five forward(const Call& call, Wanted wanted, bool accuracy);

/// The gradients of losses per row.
Three backward_outputs(const Call& call, const Tensor& grad, const Tensor& state, Wanted wanted);
Three backward(const Call& call, const Tensor& grad, const Tensor& state, Wanted wanted);

struct Forward {
  static constexpr const char* kSchema =
      "torchkiln::linear_cross_entropy_forward(Tensor x, Tensor weight, Tensor target, "
      "Tensor? bias, Tensor? class_weight, int ignore_index, str reduction, "
      "float label_smoothing, float z_loss, ScalarType? dtype, bool check_target, "
      "float? softcap, float temperature, bool[3] wanted, bool accuracy=False) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor)";
  static constexpr auto meta = of_call<forward_outputs, Wanted, bool>;
  static constexpr auto kernel = of_call<forward, Wanted, bool>;
};

struct Backward {
  static constexpr const char* kSchema =
      "torchkiln::linear_cross_entropy_backward(Tensor x, Tensor weight, Tensor target, "
      "Tensor? bias, Tensor? class_weight, int ignore_index, str reduction, "
      "float label_smoothing, float z_loss, ScalarType? dtype, bool check_target, "
      "float? softcap, float temperature, Tensor grad, Tensor state, bool[3] wanted) "
      "-> (Tensor, Tensor, Tensor)";
  static constexpr auto meta = of_call<backward_outputs, const Tensor&, const Tensor&, Wanted>;
  static constexpr auto kernel = of_call<backward, const Tensor&, const Tensor&, Wanted>;
};

}  // namespace torchkiln::linear_cross_entropy_ops
