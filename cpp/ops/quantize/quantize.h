#pragma once

// E4M3 tensors with float32 scales that are powers of two, and products of them. A scale of rows
// belongs to 128 elements along `columns`, a scale of squares to 128 x 128 elements of a weight.
// Scales have the layout that at::_scaled_mm_v2() reads. For rows, the scales of a column of blocks
// are adjacent. For squares, the scales of a row of blocks are adjacent, with zeros up to a
// multiple of 4.

#include "gated.h"
#include "torchkiln/torch/checks.h"
#include "torchkiln/torch/op.h"

namespace torchkiln::quantize_ops {

using at::Tensor;
using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;

inline constexpr at::ScalarType kFp8 = at::kFloat8_e4m3fn;

inline constexpr const char* kLinear = "linear_fp8";

/// Raises an error: the ops of this family have no derivative of their own and no batching rule.
[[noreturn]] inline void refuse_transform(const char* op) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "torchkiln.", op,
                              ": got a transform of torch.func or a tangent of forward mode, "
                              "expected a call outside of them: rounding to float8_e4m3fn has no "
                              "derivative");
}

/// x -> (data, scale): data of x's shape [..., columns], scale [..., blocks].
struct QuantizeOp {
  static constexpr const char* kSchema = "torchkiln::quantize(Tensor x) -> (Tensor, Tensor)";
  static Two meta(const Tensor& x);
  static Two kernel(const Tensor& x);
  static Two recorded(const Below& below, const Tensor& x) { return below.call<QuantizeOp>(x); }
  static Two composite(const Tensor&) { refuse_transform("quantize"); }
};

/// QuantizeOp of x, and of the transposed matrix of x seen as [rows, columns]: (data, scale,
/// transposed, transposed_scale), with one read of x. `square`: the transposed matrix has scales of
/// squares.
struct BothOp {
  static constexpr const char* kSchema =
      "torchkiln::quantize_both(Tensor x, bool square=False) -> (Tensor, Tensor, Tensor, Tensor)";
  static Four meta(const Tensor& x, bool square);
  static Four kernel(const Tensor& x, bool square);
  static Four recorded(const Below& below, const Tensor& x, bool square) {
    return below.call<BothOp>(x, square);
  }
  static Four composite(const Tensor&, bool) { refuse_transform("quantize_both"); }
};

/// QuantizeOp of the transposed matrix, computed from its E4M3 data; `square`: with scales of
/// squares. Values are unchanged except for underflow.
struct TransposeOp {
  static constexpr const char* kSchema =
      "torchkiln::transpose_quantized(Tensor data, Tensor scale, bool square=False) -> "
      "(Tensor, Tensor)";
  static Two meta(const Tensor& data, const Tensor& scale, bool square);
  static Two kernel(const Tensor& data, const Tensor& scale, bool square);
};

/// Quantises a weight [n, k] with a scale per 128 x 128 elements: (data, scale [n / 128, k / 128],
/// and data and scale of the transposed weight, which has the same values).
struct WeightOp {
  static constexpr const char* kSchema =
      "torchkiln::quantize_weight(Tensor weight) -> (Tensor, Tensor, Tensor, Tensor)";
  static Four meta(const Tensor& weight);
  static Four kernel(const Tensor& weight);
  static Four recorded(const Below& below, const Tensor& weight) {
    return below.call<WeightOp>(weight);
  }
  static Four composite(const Tensor&) { refuse_transform("quantize_weight"); }
};

/// data * scale, for scales of rows or of squares.
struct DequantizeOp {
  static constexpr const char* kSchema =
      "torchkiln::dequantize(Tensor data, Tensor scale, ScalarType dtype=float) -> Tensor";
  static Tensor meta(const Tensor& data, const Tensor& scale, at::ScalarType dtype);
  static Tensor kernel(const Tensor& data, const Tensor& scale, at::ScalarType dtype);
};

/// a [..., k] times the transposed b [n, k], plus bias, in `dtype`. `a` has scales of rows; b has
/// scales of squares if `square`, else of rows.
struct ProductOp {
  static constexpr const char* kSchema =
      "torchkiln::_quantized_product(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, "
      "bool square, Tensor? bias, ScalarType dtype) -> Tensor";
  static Tensor meta(const Tensor& a, const Tensor& a_scale, const Tensor& b, const Tensor& b_scale,
                     bool square, const MaybeTensor& bias, at::ScalarType dtype);
  static Tensor kernel(const Tensor& a, const Tensor& a_scale, const Tensor& b,
                       const Tensor& b_scale, bool square, const MaybeTensor& bias,
                       at::ScalarType dtype);
};

/// act(gate) * up in E4M3, for two tensors or the halves of one: (data, scale, the tensor that
/// stands for the result).
struct GatedOp {
  static constexpr const char* kSchema =
      "torchkiln::_gated_fp8(Tensor gate, Tensor? up, str act) -> (Tensor, Tensor, Tensor)";
  static Three meta(const Tensor& gate, const MaybeTensor& up, Gate act);
  static Three kernel(const Tensor& gate, const MaybeTensor& up, Gate act);
  static Three composite(const Tensor& gate, const MaybeTensor& up, Gate act);
  static Three recorded(const Below& below, const Tensor& gate, const MaybeTensor& up, Gate act);
};

/// BothOp of the gradient of packed rows, whose halves are gate and up. The gradient is not written
/// in floating point.
struct GatedGradientOp {
  static constexpr const char* kSchema =
      "torchkiln::_gated_fp8_backward(Tensor grad, Tensor packed, str act) -> "
      "(Tensor, Tensor, Tensor, Tensor)";
  static Four meta(const Tensor& grad, const Tensor& packed, Gate act);
  static Four kernel(const Tensor& grad, const Tensor& packed, Gate act);
};

/// Checks that x has a dtype that is quantised.
void check_source(const char* op, const char* name, const Tensor& x);

/// Uninitialised E4M3 data of this shape, and scales for its rows.
Two empty_quantized(c10::SymIntArrayRef shape, const Tensor& like);

/// Uninitialised E4M3 data and scales of x, at least one-dimensional, as a transposed matrix.
/// `square`: one scale per 128 x 128 elements.
Two empty_transposed(const Tensor& x, bool square = false);

/// The tensor that stands in autograd for a result that exists in E4M3 only: it receives the
/// gradient of that result. Its elements share one uninitialised element of memory.
Tensor stand_in(c10::SymIntArrayRef shape, const at::TensorOptions& options);

/// Checks that `data` is E4M3, with one scale per 128 elements of each row.
void check_quantized_rows(const char* op, const char* data_name, const Tensor& data,
                          const char* scale_name, const Tensor& scale);

/// The number of blocks of 128 elements in `elements`.
inline c10::SymInt blocks_of(const c10::SymInt& elements) { return (elements + 127) / 128; }

}  // namespace torchkiln::quantize_ops
