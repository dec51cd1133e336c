// Products of E4M3 tensors. A GPU of compute capability 9.0 uses torch's scaled product; a CPU
// multiplies the exact values of both tensors in float32.

#include <ATen/BlasBackend.h>
#include <ATen/detail/CUDAHooksInterface.h>

#include "quantize/quantize.h"
#include "torchkiln/kernels/quantize.h"
#include "torchkiln/torch/empty.h"
#include "torchkiln/torch/launch.h"

namespace torchkiln::quantize_ops {
namespace {

constexpr int64_t kStep = 16;   // torch's product needs sizes that are multiples of it
constexpr int64_t kBytes = 16;  // and addresses that are multiples of it

int64_t whole_steps(int64_t size) { return (size + kStep - 1) / kStep * kStep; }

/// The operand itself, or a copy if it does not begin at a multiple of 16 bytes: for such a matrix,
/// scale or bias, cuBLASLt has no FP8 product, and a view may begin at any element.
Tensor aligned(const char* name, const Tensor& operand) {
  if (reinterpret_cast<uintptr_t>(operand.const_data_ptr()) % kBytes == 0) return operand;
  trace::note("copied: ", name, " does not begin at a multiple of ", kBytes, " bytes");
  return operand.clone();
}

/// The matrix with zeros in added rows and columns. It is padded as bytes, because torch cannot pad
/// E4M3.
Tensor padded(const Tensor& matrix, int64_t rows, int64_t columns) {
  const int64_t more_rows = rows - matrix.size(0), more_columns = columns - matrix.size(1);
  if (more_rows == 0 && more_columns == 0) return matrix.contiguous();
  trace::note("copied: sizes ", matrix.sizes(), " are no multiples of ", kStep);
  return at::constant_pad_nd(matrix.view(at::kByte), {0, more_columns, 0, more_rows}).view(kFp8);
}

/// The scales of `rows` rows, [rows, blocks], where the scales of a column of blocks are adjacent;
/// 1 for added rows.
Tensor row_scales(const Tensor& scale, int64_t rows) {
  if (scale.size(0) == rows && scale.stride(0) == 1 && scale.stride(1) == rows) return scale;
  Tensor columns = scale.t();
  const int64_t more = rows - columns.size(1);
  if (more > 0) columns = at::constant_pad_nd(columns, {0, more}, 1);
  return columns.contiguous().as_strided({rows, columns.size(0)}, {1, rows});
}

/// The scales of squares, [n / 128, k / 128], in the form that torch reads: transposed, with zeros
/// up to a multiple of 4 rows.
Tensor square_scales(const Tensor& scale) {
  const int64_t blocks = scale.size(1), all = (blocks + 3) / 4 * 4;
  const std::array<int64_t, 2> shape{all, scale.size(0)}, strides{1, all};
  const bool is_laid_out = scale.stride(1) == 1 && (scale.size(0) == 1 || scale.stride(0) == all) &&
                           scale.storage_offset() + scale.size(0) * all <=
                               static_cast<int64_t>(scale.storage().nbytes() / sizeof(float));
  if (is_laid_out) return scale.as_strided(shape, strides);
  return at::constant_pad_nd(scale.contiguous(), {0, all - blocks}).as_strided(shape, strides);
}

bool has_product([[maybe_unused]] const Tensor& where) {
  bool found = false;
#ifdef TORCHKILN_WITH_CUDA
  constexpr int64_t kFirstWithBlocks = 12090;  // CUDA 12.9
  if (at::detail::getCUDAHooks().versionCUDART() < kFirstWithBlocks) return false;
  torch_cuda().on_stream(where.device(), [&](CUstream_st*) { found = cuda::has_block_products(); });
#endif
  return found;
}

/// The product by torch's op. `bias` has the dtype of the result.
Tensor on_gpu(const Tensor& a, const Tensor& a_scale, const Tensor& b, const Tensor& b_scale,
              bool square, const MaybeTensor& bias, at::ScalarType dtype) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      has_product(a), "torchkiln.", kLinear, ": x: got ", a.device(),
      ", expected a GPU of compute capability 9.0 and a torch with CUDA 12.9 or later: torch "
      "multiplies float8_e4m3fn with a scale for each 128 elements on no other; use "
      "torchkiln.linear");
  using at::blas::ScalingType;
  const auto recipe = [](ScalingType type) { return static_cast<int64_t>(type); };
  const int64_t rows = whole_steps(a.size(0)), columns = whole_steps(b.size(0));
  const int64_t inner = whole_steps(a.size(1));
  const bool adds = bias && dtype != at::kFloat;  // the product adds it, but not in float32
  MaybeTensor shift = adds ? bias : std::nullopt;
  if (adds && columns != b.size(0)) shift = at::constant_pad_nd(*bias, {0, columns - b.size(0)});
  if (shift) shift = aligned("bias", shift->contiguous());  // torch assumes that it is contiguous
  const Tensor left = aligned("a", padded(a, rows, inner));
  const Tensor right = aligned("b", padded(b, columns, inner));
  const Tensor left_scale = aligned("a_scale", row_scales(a_scale, rows));
  const Tensor right_scale =
      aligned("b_scale", square ? square_scales(b_scale) : row_scales(b_scale, columns));
  Tensor out = at::_scaled_mm_v2(
      left, right.t(), {left_scale}, {recipe(ScalingType::BlockWise1x128)}, {}, {right_scale},
      {recipe(square ? ScalingType::BlockWise128x128 : ScalingType::BlockWise1x128)}, {}, shift,
      dtype);
  if (rows != a.size(0) || columns != b.size(0))
    out = out.narrow(0, 0, a.size(0)).narrow(1, 0, b.size(0)).contiguous();
  return bias && !adds ? out.add_(*bias) : out;
}

Tensor on_cpu(const Tensor& a, const Tensor& a_scale, const Tensor& b, const Tensor& b_scale,
              const MaybeTensor& bias, at::ScalarType dtype) {
  const Tensor left = DequantizeOp::kernel(a, a_scale, at::kFloat);
  const Tensor right = DequantizeOp::kernel(b, b_scale, at::kFloat);
  Tensor out = left.matmul(right.t());
  if (bias) out = out.add_(bias->to(at::kFloat));
  return out.to(dtype);
}

/// Checks the arguments of a product, and returns the shape of its result.
c10::SymDimVector checked_product(const Tensor& a, const Tensor& a_scale, const Tensor& b,
                                  const Tensor& b_scale, const MaybeTensor& bias) {
  check_tensors(kLinear, {{"a", a}, {"a_scale", a_scale}, {"b", b}, {"b_scale", b_scale}});
  check_quantized_rows(kLinear, "a", a, "a_scale", a_scale);
  check_rank(kLinear, "b", b, 2, 2, "[n, k]");
  check_size(kLinear, "b", b, 1, a.sym_size(-1), "the last size of a");
  if (bias) check_vector(kLinear, "bias", *bias, b.sym_size(0), "the rows of b");
  c10::SymDimVector shape(a.sym_sizes());
  shape.back() = b.sym_size(0);
  return shape;
}

}  // namespace

Tensor ProductOp::meta(const Tensor& a, const Tensor& a_scale, const Tensor& b,
                       const Tensor& b_scale, bool, const MaybeTensor& bias, at::ScalarType dtype) {
  return empty_of(checked_product(a, a_scale, b, b_scale, bias), a.options().dtype(dtype));
}

Tensor ProductOp::kernel(const Tensor& a, const Tensor& a_scale, const Tensor& b,
                         const Tensor& b_scale, bool square, const MaybeTensor& bias,
                         at::ScalarType dtype) {
  const c10::SymDimVector shape = checked_product(a, a_scale, b, b_scale, bias);
  const int64_t columns = a.size(-1), features = b.size(0);
  if (a.numel() == 0 || features == 0) {
    const Tensor out = empty_of(shape, a.options().dtype(dtype));
    return bias ? out.copy_(*bias) : out.zero_();
  }
  const int64_t rows = a.numel() / columns;
  const bool is_matrix = a.dim() == 2;  // a view costs the host 1 to 2 us
  const Tensor left = is_matrix ? a : a.reshape({rows, columns});
  const Tensor left_scale = is_matrix ? a_scale : a_scale.reshape({rows, a_scale.size(-1)});
  const bool is_cast = bias && bias->scalar_type() != dtype;
  const MaybeTensor shift = is_cast ? MaybeTensor(bias->to(dtype)) : bias;
  const Tensor out = a.is_cpu() ? on_cpu(left, left_scale, b, b_scale, bias, dtype)
                                : on_gpu(left, left_scale, b, b_scale, square, shift, dtype);
  return is_matrix ? out : out.view_symint(shape);
}

TORCH_LIBRARY_FRAGMENT(torchkiln, m) { define<ProductOp>(m); }

}  // namespace torchkiln::quantize_ops
