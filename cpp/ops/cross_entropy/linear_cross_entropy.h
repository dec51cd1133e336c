#pragma once

// cross_entropy() of the outputs of a linear layer, a chunk of rows at a time. Forward computes the
// logits of a chunk and, if gradients are wanted, replaces them at once by the gradient of the sum
// of the losses, from which it computes the gradients of x, weight and bias. Backward multiplies
// these gradients by a number. Losses per row have one incoming gradient each, not a common factor:
// their backward computes the chunks again. gradient_memory.h has the form for few rows and much
// memory.
//
// Declarations shared by linear_cross_entropy_kernel.cpp (checks, kernels) and
// linear_cross_entropy.cpp (the op, derivatives).

#include "cross_entropy/linear_chunks.h"
#include "detail/check_linear.h"
#include "torchkiln/torch/op.h"

namespace torchkiln::linear_cross_entropy_ops {

using at::Tensor;
using Three = std::tuple<Tensor, Tensor, Tensor>;
using Five = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

inline constexpr const char* kName = "linear_cross_entropy";
inline constexpr LinearNames kLayer{"linear_weight", "linear_bias",
                                    "the first size of linear_weight"};

/// The arguments of a call.
struct Call {
  LogitLayer layer;  // x of any shape
  Tensor target;
  LossOptions loss;

  TORCHKILN_FIELDS(self.layer.x, self.layer.weight, self.target, self.layer.bias, self.loss.weight,
                   self.loss.ignore_index, self.loss.reduction, self.loss.label_smoothing,
                   self.loss.z_loss, self.loss.loss_dtype, self.loss.check_target,
                   self.layer.softcap, self.layer.temperature);

  c10::SymInt rows() const { return target.sym_numel(); }
  at::ScalarType loss_dtype() const { return loss.loss_dtype.value_or(layer.x.scalar_type()); }
};

void check(const char* op, const Call& call);
void check_classes_if_asked(const Call& call);

/// The loss, the state of each row and the gradients of the sum of the losses. The state is that of
/// cross_entropy(): see state_size().
Five forward_outputs(const Call& call, Wanted wanted);
Five forward(const Call& call, Wanted wanted);

/// The gradients of losses without a reduction.
Three backward_outputs(const Call& call, const Tensor& grad, const Tensor& state, Wanted wanted);
Three backward(const Call& call, const Tensor& grad, const Tensor& state, Wanted wanted);

struct Forward {
  struct Arguments : Call {
    Wanted wanted;

    template <class Self>
    static auto fields(Self& self) {
      return std::tuple_cat(Call::fields(self), std::tie(self.wanted, self.loss.accuracy));
    }
  };
  static constexpr bool kFlexibleLayout = true;
  static constexpr const char* kSchema =
      "torchkiln::_linear_cross_entropy_forward(Tensor x, Tensor linear_weight, Tensor target, "
      "Tensor? linear_bias, Tensor? weight, int ignore_index, str reduction, "
      "float label_smoothing, float z_loss, ScalarType? loss_dtype, bool check_target, "
      "float? softcap, float temperature, bool[3] wanted, bool accuracy=False) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor)";

  static Five meta(const Arguments& call) { return forward_outputs(call, call.wanted); }
  static Five kernel(const Arguments& call) { return forward(call, call.wanted); }
};

struct Backward {
  static constexpr bool kFlexibleLayout = true;
  static constexpr const char* kSchema =
      "torchkiln::_linear_cross_entropy_backward(Tensor x, Tensor linear_weight, Tensor target, "
      "Tensor? linear_bias, Tensor? weight, int ignore_index, str reduction, "
      "float label_smoothing, float z_loss, ScalarType? loss_dtype, bool check_target, "
      "float? softcap, float temperature, Tensor grad, Tensor state, bool[3] wanted) "
      "-> (Tensor, Tensor, Tensor)";
  static constexpr auto meta = backward_outputs;
  static constexpr auto kernel = backward;
};

}  // namespace torchkiln::linear_cross_entropy_ops
