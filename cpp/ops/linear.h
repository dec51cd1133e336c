#pragma once

// What the files of linear() share.

#include <ATen/ATen.h>

#include <optional>
#include <tuple>

#include "activations.h"

namespace torchkiln {

using MaybeTensor = std::optional<at::Tensor>;

inline constexpr const char* kLinear = "linear";

using LinearSchema = at::Tensor(const at::Tensor& x, const at::Tensor& weight,
                                const MaybeTensor& bias, c10::string_view act, double scale,
                                const MaybeTensor& residual);
using LinearForwardSchema = std::tuple<at::Tensor, at::Tensor>(const at::Tensor& x,
                                                               const at::Tensor& weight,
                                                               const MaybeTensor& bias,
                                                               c10::string_view act, double scale,
                                                               const MaybeTensor& residual);

/// What backward keeps for the derivative: the output serves where its sign is enough, unless a
/// residual was added to it.
enum class Kept { nothing, output, preactivation };

inline Kept kept_by_linear(Activation activation, bool has_residual) {
  switch (saved_by(activation)) {
    case Saved::nothing:
      return Kept::nothing;
    case Saved::sign:
      return has_residual ? Kept::preactivation : Kept::output;
    default:
      return Kept::preactivation;
  }
}

/// The sizes of the output, of checked arguments; on Meta and symbolic tensors, too.
c10::SymDimVector linear_sizes(const at::Tensor& x, const at::Tensor& weight,
                               const MaybeTensor& bias, c10::string_view act,
                               const MaybeTensor& residual);

}  // namespace torchkiln
