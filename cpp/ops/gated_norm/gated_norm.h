#pragma once

// Declarations for kernel.cpp (checks, kernels), composed.cpp (rows that are too long for one
// kernel) and gated_norm.cpp (the op, derivatives).

#include "torchkiln/torch/op.h"

namespace torchkiln::gated_norm_ops {

using at::Tensor;
using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

/// The arguments of the op and of its forward.
struct Call {
  Borrowed<Tensor> x;
  Borrowed<Tensor> gate;
  c10::SymIntArrayRef shape;     // normalized_shape: the last sizes of x
  Borrowed<MaybeTensor> weight;  // without one the factor is 1, and offset is ignored
  double eps;
  bool gate_first;
  int64_t groups;  // equal parts of the last dimension that are normalized separately
  double offset;

  TORCHKILN_FIELDS(self.x, self.gate, self.shape, self.weight, self.eps, self.gate_first,
                   self.groups, self.offset);
};

/// Checks the arguments and returns uninitialised outputs: y, and rstd of each group for backward,
/// [leading sizes of x, groups] (undefined unless wanted).
Two outputs(const Call& call, bool wants_rstd);

/// Computes the outputs.
Two run(const Call& call, bool wants_rstd);

/// The forward op that also returns rstd: {y, rstd}.
struct Forward {
  static constexpr bool kFlexibleLayout = true;
  static constexpr const char* kSchema =
      "torchkiln::_gated_rms_norm_forward(Tensor x, Tensor gate, SymInt[] normalized_shape, "
      "Tensor? weight, float eps, bool gate_first, int groups, float offset) -> (Tensor, Tensor)";
  static Two meta(const Call& call) { return outputs(call, /*wants_rstd=*/true); }
  static Two kernel(const Call& call) { return run(call, /*wants_rstd=*/true); }
};

/// Computes the wanted gradients of x, gate and weight. The shape of rstd determines the number of
/// normalized dimensions and of groups.
struct Backward {
  using Wanted = std::array<bool, 3>;
  struct Arguments {
    Borrowed<Tensor> grad, x, gate, rstd;
    Borrowed<MaybeTensor> weight;
    bool gate_first;
    double offset;
    Wanted wanted;

    TORCHKILN_FIELDS(self.grad, self.x, self.gate, self.rstd, self.weight, self.gate_first,
                     self.offset, self.wanted);
  };
  static constexpr bool kFlexibleLayout = true;
  static constexpr const char* kSchema =
      "torchkiln::_gated_rms_norm_backward(Tensor grad, Tensor x, Tensor gate, Tensor rstd, "
      "Tensor? weight, bool gate_first, float offset, bool[3] wanted) -> (Tensor, Tensor, Tensor)";
  static Three meta(const Arguments& call);
  static Three kernel(const Arguments& call);
};

/// The op composed of the kernels of the gate and of the norm, in the compute dtype, for rows that
/// its own kernels do not support. Returns {y, rstd}.
Two composed_forward(const Call& call);

/// The gradients of x, gate and weight for composed_forward(); that of the weight is undefined
/// without a weight.
Three composed_backward(const Backward::Arguments& call);

}  // namespace torchkiln::gated_norm_ops
