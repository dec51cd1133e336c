// quantize, quantize_both, quantize_weight, transpose_quantized and dequantize: checks, outputs and
// launches. product.cpp multiplies their results, linear_fp8.cpp is the layer.

#include "quantize/quantize.h"

#include "detail/rows_view.h"
#include "torchkiln/kernels/quantize.h"
#include "torchkiln/torch/elementwise.h"
#include "torchkiln/torch/empty.h"
#include "torchkiln/torch/launch.h"
#include "torchkiln/torch/ops.h"

namespace torchkiln::quantize_ops {
namespace {

using c10::SymInt;

constexpr int64_t kScalesPerStep = 4;  // a row of scales of squares is padded to a multiple of this

void check_fp8(const char* op, const char* data_name, const Tensor& data, const char* scale_name,
               const Tensor& scale) {
  check_tensors(op, {{data_name, data}, {scale_name, scale}});
  TORCH_CHECK(data.scalar_type() == kFp8, "torchkiln.", op, ": ", data_name, ": got dtype ",
              dtype_name(data.scalar_type()),
              ", expected float8_e4m3fn; call torchkiln.quantize()");
  TORCH_CHECK(scale.scalar_type() == at::kFloat, "torchkiln.", op, ": ", scale_name, ": got dtype ",
              dtype_name(scale.scalar_type()), ", expected float32");
  check_not_0_dim(op, data_name, data);
}

/// The shape of the scales of rows: the shape of `data` with the number of blocks as the last size.
c10::SymDimVector scale_shape(const Tensor& data) {
  c10::SymDimVector shape(data.sym_sizes());
  shape.back() = blocks_of(shape.back());
  return shape;
}

/// The number of rows: the product of all sizes but the last one.
SymInt rows_of(const Tensor& x) {
  SymInt rows = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) rows *= x.sym_size(d);
  return rows;
}

Tensor empty_data(c10::SymIntArrayRef shape, const Tensor& like) {
  return empty_of(shape, like.options().dtype(kFp8));
}

/// Uninitialised scales for the rows of a tensor of this shape. Those of a column of blocks are
/// adjacent.
Tensor empty_scale(c10::SymIntArrayRef shape, const Tensor& like) {
  c10::SymDimVector sizes(shape.begin(), shape.end()), strides(shape.size(), 1);
  sizes.back() = blocks_of(shape.back());
  SymInt rows = 1;
  for (size_t d = shape.size() - 1; d-- > 0;) {
    strides[d] = rows;
    rows *= shape[d].max(1);
  }
  strides.back() = rows;
  return at::empty_strided_symint(sizes, strides, like.options().dtype(at::kFloat));
}

/// Uninitialised scales for the squares of a matrix.
Tensor empty_squares(const SymInt& rows, const SymInt& columns, const Tensor& like) {
  const SymInt blocks = blocks_of(columns);
  const SymInt stride = (blocks + (kScalesPerStep - 1)) / kScalesPerStep * kScalesPerStep;
  return empty_of({blocks_of(rows), stride}, like.options().dtype(at::kFloat))
      .narrow_symint(1, 0, blocks);
}

uint8_t* bytes(const Tensor& tensor) { return static_cast<uint8_t*>(tensor.data_ptr()); }

/// A result: data, scales, and whether these are of squares. Undefined tensors are not wanted.
struct Result {
  Tensor data, scale;
  bool square = false;
};

/// Quantises x into the results.
void run(const char* op, const Tensor& x, const Tensor& x_scale, const Result& rows,
         const Result& transposed) {
  if (x.numel() == 0) return;
  const int64_t columns = x.size(-1), count = x.numel() / columns;
  const RowsView view = view_as_rows(x, count, columns);
  Quantize p{};
  p.x = view.tensor->const_data_ptr();
  if (x_scale.defined()) p.x_scale = x_scale.const_data_ptr<float>();
  p.dtype = dtype_of(x);
  p.rows = count;
  p.columns = columns;
  p.stride = view.stride;
  p.square = rows.square;
  p.transposed_square = transposed.square;
  const auto put = [](const Result& result, uint8_t*& data, float*& scale, int64_t& stride) {
    if (!result.data.defined()) return;
    data = bytes(result.data);
    scale = result.scale.data_ptr<float>();
    stride = result.scale.stride(0);
  };
  put(rows, p.data, p.scale, p.scale_stride);
  put(transposed, p.transposed, p.transposed_scale, p.transposed_scale_stride);
  launch(
      op, x, p.tiles(), 1, [&](auto stream) { return cuda::quantize(p, stream); },
      [&](int64_t begin, int64_t end) { return cpu::quantize(p, begin, end); });
}

}  // namespace

void check_source(const char* op, const char* name, const Tensor& x) {
  check_tensor(op, name, x);
  const at::ScalarType dtype = x.scalar_type();
  TORCH_CHECK(dtype == at::kFloat || is_half(dtype), "torchkiln.", op, ": ", name, ": got dtype ",
              dtype_name(dtype), ", expected one of float32, float16, bfloat16");
}

Two empty_quantized(c10::SymIntArrayRef shape, const Tensor& like) {
  return {empty_data(shape, like), empty_scale(shape, like)};
}

Two empty_transposed(const Tensor& x, bool square) {
  const std::array<SymInt, 2> shape{x.sym_size(-1), rows_of(x)};
  if (!square) return empty_quantized(shape, x);
  return {empty_data(shape, x), empty_squares(shape[0], shape[1], x)};
}

Tensor stand_in(c10::SymIntArrayRef shape, const at::TensorOptions& options) {
  const c10::SymDimVector strides(shape.size(), 0);
  return at::empty_strided_symint(shape, strides, options);
}

void check_quantized_rows(const char* op, const char* data_name, const Tensor& data,
                          const char* scale_name, const Tensor& scale) {
  check_fp8(op, data_name, data, scale_name, scale);
  const c10::SymDimVector expected = scale_shape(data);
  TORCH_CHECK(scale.sym_sizes().equals(expected), "torchkiln.", op, ": ", scale_name,
              ": got shape ", scale.sym_sizes(), ", expected ", c10::SymIntArrayRef(expected),
              ", a scale for each 128 elements of a row of ", data_name);
}

Two QuantizeOp::meta(const Tensor& x) {
  check_source("quantize", "x", x);
  check_not_0_dim("quantize", "x", x);
  return empty_quantized(x.sym_sizes(), x);
}

Two QuantizeOp::kernel(const Tensor& x) {
  Two out = meta(x);
  const auto& [data, scale] = out;
  run("quantize", x, Tensor(), {data, scale}, {});
  return out;
}

Four BothOp::meta(const Tensor& x, bool square) {
  check_source("quantize_both", "x", x);
  check_not_0_dim("quantize_both", "x", x);
  return std::tuple_cat(empty_quantized(x.sym_sizes(), x), empty_transposed(x, square));
}

Four BothOp::kernel(const Tensor& x, bool square) {
  Four out = meta(x, square);
  const auto& [data, scale, transposed, transposed_scale] = out;
  run("quantize_both", x, Tensor(), {data, scale}, {transposed, transposed_scale, square});
  return out;
}

Two TransposeOp::meta(const Tensor& data, const Tensor& scale, bool square) {
  check_quantized_rows("transpose_quantized", "data", data, "scale", scale);
  return empty_transposed(data, square);
}

Two TransposeOp::kernel(const Tensor& data, const Tensor& scale, bool square) {
  Two out = meta(data, scale, square);
  const auto& [transposed, transposed_scale] = out;
  const Tensor blocks = scale.movedim(-1, 0).contiguous();  // our own scales are not copied
  run("transpose_quantized", data, blocks, {}, {transposed, transposed_scale, square});
  return out;
}

Four WeightOp::meta(const Tensor& weight) {
  check_source("quantize_weight", "weight", weight);
  check_rank("quantize_weight", "weight", weight, 2, 2, "[n, k]");
  const SymInt rows = weight.sym_size(0), columns = weight.sym_size(1);
  return {empty_data(weight.sym_sizes(), weight), empty_squares(rows, columns, weight),
          empty_data({columns, rows}, weight), empty_squares(columns, rows, weight)};
}

Four WeightOp::kernel(const Tensor& weight) {
  Four out = meta(weight);
  const auto& [data, scale, transposed, transposed_scale] = out;
  run("quantize_weight", weight, Tensor(), {data, scale, true},
      {transposed, transposed_scale, true});
  return out;
}

Tensor DequantizeOp::meta(const Tensor& data, const Tensor& scale, at::ScalarType dtype) {
  constexpr const char* kName = "dequantize";
  check_fp8(kName, "data", data, "scale", scale);
  TORCH_CHECK(is_supported_dtype(dtype), "torchkiln.", kName, ": dtype: got ", dtype_name(dtype),
              ", expected ", kSupportedDtypes);
  const c10::SymDimVector rows = scale_shape(data);
  c10::SymDimVector squares = rows;
  if (data.dim() == 2) squares.front() = blocks_of(squares.front());
  TORCH_CHECK(scale.sym_sizes().equals(rows) || scale.sym_sizes().equals(squares), "torchkiln.",
              kName, ": scale: got shape ", scale.sym_sizes(), ", expected ",
              c10::SymIntArrayRef(rows), ", a scale for each 128 elements of a row, or ",
              c10::SymIntArrayRef(squares), ", for each 128 x 128 elements");
  return empty_of(data.sym_sizes(), data.options().dtype(dtype));
}

namespace {

/// The values of a tensor on a CPU in float32.
void widen(const Tensor& data, const Tensor& scale, const Tensor& out) {
  if (data.numel() == 0) return;
  const int64_t columns = data.size(-1), rows = data.numel() / columns;
  const auto bytes = data.expect_contiguous();
  const bool is_matrix = scale.dim() == 2;
  const Tensor scales = is_matrix ? scale : scale.reshape({-1, scale.size(-1)});
  const Dequantize p{static_cast<const uint8_t*>(bytes->const_data_ptr()),
                     scales.const_data_ptr<float>(),
                     out.data_ptr<float>(),
                     columns,
                     scales.stride(0),
                     scales.stride(1),
                     scales.size(0) != rows};
  at::parallel_for(0, rows, std::max<int64_t>(1, kElementwiseGrain / columns),
                   [&](int64_t begin, int64_t end) {
                     check_status("dequantize", cpu::dequantize(p, begin, end));
                   });
}

}  // namespace

Tensor DequantizeOp::kernel(const Tensor& data, const Tensor& scale, at::ScalarType dtype) {
  Tensor out = meta(data, scale, dtype);
  if (data.is_cpu() && dtype != at::kDouble) {
    const bool is_float = dtype == at::kFloat;
    const Tensor wide = is_float ? out : at::empty(out.sizes(), out.options().dtype(at::kFloat));
    widen(data, scale, wide);
    return is_float ? out : out.copy_(wide);
  }
  const int64_t columns = data.size(-1);
  Tensor each = scale.repeat_interleave(kScaledElements, -1).narrow(-1, 0, columns);
  if (data.dim() == 2 && scale.size(0) != data.size(0))
    each = each.repeat_interleave(kScaledElements, 0).narrow(0, 0, data.size(0));
  // The product is computed in float64, where a number times a power of two is exact, and is
  // rounded once.
  return out.copy_(data.to(at::kDouble).mul_(each));
}

TORCH_LIBRARY_FRAGMENT(torchkiln, m) {
  define<QuantizeOp, BothOp, TransposeOp, WeightOp, DequantizeOp>(m);
}

}  // namespace torchkiln::quantize_ops

namespace torchkiln {

std::tuple<at::Tensor, at::Tensor> quantize(const at::Tensor& x) {
  return call<quantize_ops::QuantizeOp>(x);
}
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> quantize_both(const at::Tensor& x,
                                                                         bool square) {
  return call<quantize_ops::BothOp>(x, square);
}
std::tuple<at::Tensor, at::Tensor> transpose_quantized(const at::Tensor& data,
                                                       const at::Tensor& scale, bool square) {
  return call<quantize_ops::TransposeOp>(data, scale, square);
}
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> quantize_weight(
    const at::Tensor& weight) {
  return call<quantize_ops::WeightOp>(weight);
}
at::Tensor dequantize(const at::Tensor& data, const at::Tensor& scale, at::ScalarType dtype) {
  return call<quantize_ops::DequantizeOp>(data, scale, dtype);
}

}  // namespace torchkiln
