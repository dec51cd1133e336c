#pragma once

// The logits of a linear layer and their gradients, a chunk of rows at a time. class_chunks.h has
// chunks of classes.

#include <ATen/ATen.h>

#include <algorithm>

#include "cross_entropy/kernel.h"
#include "detail/whole_tiles.h"
#include "matmul/kernel.h"
#include "matmul/padded.h"
#include "torchkiln/torch/autograd.h"
#include "torchkiln/torch/empty.h"
#include "torchkiln/torch/note.h"
#include "torchkiln/torch/ops.h"

namespace torchkiln {

/// A linear layer whose outputs are logits.
struct LogitLayer {
  at::Tensor x;       // [rows, features]
  at::Tensor weight;  // [classes, features]
  MaybeTensor bias;   // [classes]
  std::optional<double> softcap;
  double temperature = 1;               // divides the logits, after the softcap
  std::optional<at::ScalarType> dtype;  // dtype of the logits: x's, or its compute dtype

  /// Whether the logits have a wider dtype than their gradient.
  bool is_wide() const { return dtype.value_or(x.scalar_type()) != x.scalar_type(); }
};

/// Rows or classes per chunk, if each takes `bytes` bytes of logits: as many as fit in 1 GiB, at
/// least `least` and at most `most`. Large chunks are better, because each chunk reads and writes a
/// whole gradient to add to it. All chunks have about the same size.
inline int64_t size_of_chunk(int64_t all, int64_t bytes, int64_t least, int64_t most) {
  constexpr int64_t kBytes = int64_t{1} << 30;
  const int64_t fitting = std::clamp(kBytes / bytes, least, most);
  const int64_t chunks = std::max<int64_t>((all + fitting - 1) / fitting, 1);
  return (all + chunks - 1) / chunks;
}
inline constexpr int64_t kMostRowsOfChunk = 8192;

/// Bytes of memory in a chunk per logit. A softcap needs two more copies of the logits in the
/// compute dtype, wide logits one.
inline int64_t bytes_of_logit(const LogitLayer& layer) {
  const at::ScalarType dtype = layer.x.scalar_type();
  const size_t copies = layer.softcap ? 2 : layer.is_wide() ? 1 : 0;
  return static_cast<int64_t>(c10::elementSize(dtype) +
                              copies * c10::elementSize(compute_dtype(dtype)));
}

/// Rows per chunk of a layer. `may_be_whole`: up to 8192 rows are one chunk if this takes no more
/// memory than smaller chunks and a float32 sum of the weight's gradient. On a GPU all rows are one
/// chunk if their logits are small compared to x, because products of fewer rows would leave SMs
/// idle.
inline int64_t rows_per_chunk(const LogitLayer& layer, bool may_be_whole) {
  constexpr int64_t kLeast = 2048;
  const at::ScalarType dtype = layer.x.scalar_type();
  const int64_t row = layer.weight.size(0) * bytes_of_logit(layer);
  const int64_t rows = layer.x.size(0);
  const int64_t row_of_x = layer.x.size(1) * static_cast<int64_t>(c10::elementSize(dtype));
  if (layer.x.is_cuda() && row * 8 <= row_of_x) return rows;
  const int64_t size = size_of_chunk(rows, row, kLeast, kMostRowsOfChunk);
  const int64_t saved =
      layer.weight.numel() * static_cast<int64_t>(sizeof(float) - c10::elementSize(dtype));
  const bool is_whole = may_be_whole && rows <= kMostRowsOfChunk && (rows - size) * row <= saved;
  return is_whole ? rows : size;
}

/// The rows begin <= row < begin + count; of() returns them as a view of a tensor.
struct Rows {
  int64_t begin;
  int64_t count;
  at::Tensor of(const at::Tensor& tensor) const { return tensor.narrow(0, begin, count); }
};
using Classes = Rows;  // the rows of the weight

/// Calls body(chunk) for each chunk of `size` rows or classes, out of `all`.
template <class Body>
void for_each_chunk(const char* name, int64_t all, int64_t size, const Body& body) {
  trace::note("logits of ", size, " ", name, " at a time");
  for (int64_t begin = 0; begin < all; begin += size)
    body(Rows{begin, std::min(size, all - begin)});
}

/// Calls body(rows) for blocks of the rows of `a`, the left factor of a product: 512 KiB in
/// float32 per block, but at least 256 rows.
template <class Body>
void for_blocks_of_factor(const at::Tensor& a, int64_t columns, const Body& body) {
  constexpr int64_t kElements = int64_t{1} << 17, kLeast = 256;
  const int64_t size = std::max(kElements / std::max({a.size(1), columns, int64_t{1}}), kLeast);
  for (int64_t begin = 0; begin < a.size(0); begin += size)
    body(Rows{begin, std::min(size, a.size(0) - begin)});
}

/// A matrix in a wider dtype. A transposed matrix stays one, because a conversion reads adjacent
/// elements faster.
inline at::Tensor widened(const at::Tensor& matrix, at::ScalarType dtype) {
  return matrix.stride(0) == 1 ? matrix.t().to(dtype).t() : matrix.to(dtype);
}

/// out = scale * (a b + bias), computed in float32 and rounded once.
inline void round_product(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
                          const MaybeTensor& bias = {}, double scale = 1) {
  const at::Tensor wide = widened(b, at::kFloat);
  for_blocks_of_factor(a, b.size(1), [&](const Rows& block) {
    const at::Tensor product = at::mm(widened(block.of(a), at::kFloat), wide);
    if (bias) product.add_(*bias);
    if (scale != 1) product.mul_(scale);
    block.of(out).copy_(product);
  });
}

/// Whether torch's product takes longer than one in float32 with conversions: 4 to 90 times as long
/// for float16 on an x86 processor without instructions for it.
inline bool has_slow_product(const at::Tensor& out) {
  return out.is_cpu() && out.scalar_type() == at::kHalf;
}

/// sum = a b, or sum += a b. The sum is float32 for factors of half precision. On a CPU it may have
/// half precision if the product is the first.
inline void add_product(at::Tensor sum, const at::Tensor& a, const at::Tensor& b, bool is_first) {
  const double beta = is_first ? 0 : 1;
  const at::ScalarType dtype = sum.scalar_type();
  const bool is_same = dtype == a.scalar_type();
  if (is_same && a.is_cpu() && compute_dtype(dtype) != dtype) {
    round_product(sum, a, b);
  } else if (is_same) {
    sum.addmm_(a, b, beta);
  } else if (a.is_cuda()) {
    at::addmm_out(sum, sum, a, b, dtype, beta);
  } else {
    // Converts blocks of the factors to the dtype of the sum, because torch's CPU product would
    // round to half precision.
    const at::Tensor wide = widened(b, dtype);
    for_blocks_of_factor(a, /*columns=*/0, [&](const Rows& block) {
      block.of(sum).addmm_(widened(block.of(a), dtype), wide, beta);
    });
  }
}

/// Memory for the logits of one chunk. Each chunk uses it in turn.
class ChunkLogits {
 public:
  /// If `memory` [rows, classes] is defined, it holds the logits, unless they are wide.
  ChunkLogits(const char* op, const LogitLayer& layer, int64_t rows, const at::Tensor& memory = {})
      : layer_(layer), classes_(layer.weight.size(0)) {
    const PaddedSizes sizes(layer.x, layer.weight);
    stride_ = sizes.n;
    columns_ = classes_;
    const bool is_aligned = row_alignment(layer.x) == kRowBytes && layer.x.size(1) == sizes.k;
    if (stride_ != classes_ && is_aligned) {
      const at::Tensor row = at::empty({1, stride_}, layer.x.options());
      if (gains_from_padding(layer.x, layer.weight, own(row.expand({rows, stride_})))) pad(op);
    }
    if (layer.is_wide()) {
      wide_ = at::empty({rows, columns_}, layer.x.options().dtype(layer.dtype));
    } else {
      memory_ = memory.defined() ? memory : at::empty({rows, stride_}, layer.x.options());
    }
  }

  /// The layer whose logits are computed: the given layer, if necessary with added classes whose
  /// weights are 0.
  const LogitLayer& layer() const { return layer_; }

  /// Computes the logits of these rows.
  const at::Tensor& compute(const Rows& rows) {
    rows_ = rows.count;
    if (layer_.is_wide()) return compute_wide(rows);
    product_ = part(memory_);
    compute_product(rows.of(layer_.x), layer_.softcap ? 1 : 1 / layer_.temperature);
    logits_ = own(product_);
    if (!layer_.softcap) return logits_;
    const at::ScalarType compute = compute_dtype(product_.scalar_type());
    logits_ = logits_.to(compute, /*non_blocking=*/false, /*copy=*/true);
    return logits_.div_(*layer_.softcap).tanh_().mul_(bound());
  }

  /// Memory for the gradient of the outputs computed last: that of the logits unless they are wide.
  /// Added classes are 0 in it; the caller writes the other columns, own().
  const at::Tensor& gradient_memory() {
    if (layer_.is_wide()) {
      if (!memory_.defined()) memory_ = at::empty({wide_.size(0), stride_}, layer_.x.options());
      product_ = part(memory_);
    }
    // Added classes have a weight of 0: their logits are NaN where x is not finite.
    const int64_t added = columns_ - classes_;
    if (added > 0) product_.narrow(1, classes_, added).zero_();
    return product_;
  }
  /// The columns of the layer's own classes, without added classes.
  at::Tensor own(const at::Tensor& logits) const { return logits.narrow(1, 0, classes_); }

  /// The gradient of the outputs computed last; 0 for added classes. It overwrites the logits,
  /// unless they have a wider dtype. `grad` is the gradient of the losses, divided by the
  /// temperature.
  const at::Tensor& differentiate(const char* op, const at::Tensor& grad, const at::Tensor& target,
                                  const LossOptions& options, const RowState& state,
                                  const at::Tensor& grad_entropy = {}) {
    at::Tensor outputs = own(gradient_memory());
    if (!layer_.softcap) {
      run_backward(op, grad, logits_, target, options, state, outputs, grad_entropy);
      return product_;
    }
    const at::Tensor found = at::empty_like(logits_);
    run_backward(op, grad, logits_, target, options, state, found, grad_entropy);
    const at::Tensor slope = logits_.div_(bound()).square_().neg_().add_(1);
    outputs.copy_(found.mul_(slope));
    return product_;
  }

 private:
  /// Adds classes whose weights are 0, until rows are whole vectors.
  void pad(const char* op) {
    columns_ = stride_;
    trace::note("copied: the weight, for products of ", stride_, " classes, which take less time");
    layer_.weight = padded(op, layer_.weight, stride_, layer_.weight.size(1));
    if (layer_.bias) layer_.bias = at::constant_pad_nd(*layer_.bias, {0, stride_ - classes_});
  }
  /// Computes the outputs of these rows of x, times `scale`, in the dtype of x.
  void compute_product(const at::Tensor& rows, double scale) {
    const MaybeTensor& bias = layer_.bias;
    if (has_slow_product(product_))
      return round_product(product_, rows, layer_.weight.t(), bias, scale);
    const auto [x, columns] = in_whole_tiles(rows, layer_.weight.t());
    const bool adds = bias && bias->scalar_type() == product_.scalar_type();
    if (adds) {
      at::addmm_out(product_, *bias, x, columns, scale, scale);
    } else if (scale == 1) {
      at::mm_out(product_, x, columns);
    } else {
      at::addmm_out(product_, product_, x, columns, /*beta=*/0, scale);
    }
    if (bias && !adds) product_.add_(*bias, scale);
  }
  /// Computes logits that are not rounded to the dtype of x.
  const at::Tensor& compute_wide(const Rows& rows) {
    const at::Tensor product = part(wide_);
    add_product(product, rows.of(layer_.x), layer_.weight.t(), /*is_first=*/true);
    if (layer_.bias) product.add_(*layer_.bias);
    logits_ = own(product);
    if (layer_.softcap) logits_.div_(*layer_.softcap).tanh_().mul_(bound());
    return logits_;
  }
  /// The bound of the logits that a softcap sets.
  double bound() const { return *layer_.softcap / layer_.temperature; }
  /// The part of `memory` that the outputs computed last occupy.
  at::Tensor part(const at::Tensor& memory) const {
    return memory.narrow(0, 0, rows_).narrow(1, 0, columns_);
  }

  LogitLayer layer_;
  int64_t classes_, columns_ = 0, stride_ = 0, rows_ = 0;
  at::Tensor memory_, wide_;  // logits in the dtype of x, with stride_ columns; wide logits
  at::Tensor product_, logits_;
};

/// The dtype of the gradient of the weight: float32 for float16, whose range is too small for a sum
/// over all rows.
inline at::ScalarType weight_gradient_dtype(at::ScalarType dtype) {
  return dtype == at::kHalf ? at::kFloat : dtype;
}

/// Whether a product over all rows may compute the gradient of the weight in the weight's dtype.
/// Small products are split along the rows, and cuBLAS and torch's CPU products may round the
/// partial sums to half precision.
inline bool has_exact_gradient(const at::Tensor& weight) {
  constexpr int64_t kLeastElements = int64_t{1} << 24;
  const bool is_half = weight.scalar_type() == at::kBFloat16 || weight.scalar_type() == at::kHalf;
  return !is_half || (weight.is_cuda() && weight.numel() >= kLeastElements);
}

/// Uninitialised memory for the sum that becomes the gradient of the weight.
inline at::Tensor empty_weight_sum(const at::Tensor& weight, bool is_one_chunk) {
  const at::ScalarType dtype = weight.scalar_type();
  const bool is_gradient = is_one_chunk && (weight.is_cpu() || has_exact_gradient(weight));
  return at::empty(weight.sizes(), weight.options().dtype(is_gradient ? weight_gradient_dtype(dtype)
                                                                      : compute_dtype(dtype)));
}

/// The gradient of the weight from its sum, which may have more classes than the weight.
inline at::Tensor weight_gradient(const at::Tensor& sum, const at::Tensor& weight) {
  const at::ScalarType dtype = weight_gradient_dtype(weight.scalar_type());
  if (sum.scalar_type() == dtype && sum.size(0) == weight.size(0)) return sum;
  return sum.narrow(0, 0, weight.size(0)).to(dtype, /*non_blocking=*/false, /*copy=*/true);
}

/// The sum of the rows of a matrix.
inline at::Tensor sum_of_rows(const at::Tensor& matrix, at::ScalarType dtype) {
  constexpr int64_t kOverRows[] = {0};
  return torchkiln::sum(matrix, at::IntArrayRef(kOverRows), false, dtype);
}

/// The gradients of a layer; undefined if not wanted. The gradient of the weight may have more
/// classes than the layer, and another dtype.
struct LayerGradients {
  at::Tensor x, weight, bias;

  bool any() const { return x.defined() || weight.defined() || bias.defined(); }

  /// Adds the gradients of a chunk, from the gradient of its logits.
  void add(const LogitLayer& layer, const Rows& rows, const at::Tensor& of_logits) const {
    const bool is_first = rows.begin == 0;
    if (x.defined()) {
      at::Tensor part = rows.of(x);
      const auto [left, right] = in_whole_tiles(of_logits, layer.weight);
      has_slow_product(part) ? round_product(part, left, right)
                             : (void)at::mm_out(part, left, right);
    }
    if (weight.defined()) add_product(weight, of_logits.t(), rows.of(layer.x), is_first);
    if (!bias.defined()) return;
    const at::Tensor part = sum_of_rows(of_logits.narrow(1, 0, bias.size(0)), bias.scalar_type());
    is_first ? bias.copy_(part) : bias.add_(part);
  }
};

using Wanted = std::array<bool, 3>;  // the gradients of x, weight and bias

/// Uninitialised gradients of x, weight and bias.
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> empty_gradients(const LogitLayer& layer,
                                                                      Wanted wanted) {
  const at::ScalarType dtype = layer.x.scalar_type();
  const auto like = [&](bool is_wanted, const at::Tensor& parameter, at::ScalarType of) {
    return is_wanted ? empty_of(parameter.sym_sizes(), layer.x.options().dtype(of))
                     : no_output(layer.x);
  };
  return {wanted[0] ? empty_contiguous(layer.x) : no_output(layer.x),
          like(wanted[1], layer.weight, weight_gradient_dtype(dtype)),
          like(wanted[2], layer.bias.value_or(layer.x), compute_dtype(dtype))};
}

/// All gradients except that of the weight, which is allocated once the logits are freed.
inline Wanted without_weight(const Wanted& wanted) { return {wanted[0], false, wanted[2]}; }

/// Calls body(logits, gradients, rows) for each chunk of `size` rows. Returns the gradient of the
/// weight, if it is wanted.
template <class Body>
at::Tensor for_each_chunk_of_logits(const char* op, const LogitLayer& layer, const Wanted& wanted,
                                    const at::Tensor& grad_x, const at::Tensor& grad_bias,
                                    int64_t size, const Body& body) {
  const int64_t rows = layer.x.size(0);
  LayerGradients gradients{wanted[0] ? as_matrix(grad_x) : at::Tensor(), at::Tensor(),
                           wanted[2] ? grad_bias : at::Tensor()};
  {
    ChunkLogits logits(op, layer, size);
    if (wanted[1]) gradients.weight = empty_weight_sum(logits.layer().weight, size == rows);
    for_each_chunk("rows", rows, size, [&](const Rows& chunk) { body(logits, gradients, chunk); });
  }
  return wanted[1] ? weight_gradient(gradients.weight, layer.weight) : at::Tensor();
}

/// for_each_chunk_of_logits() with chunks of rows_per_chunk() rows.
template <class Body>
at::Tensor for_each_chunk_of_logits(const char* op, const LogitLayer& layer, const Wanted& wanted,
                                    const at::Tensor& grad_x, const at::Tensor& grad_bias,
                                    const Body& body) {
  const bool may_be_whole =
      wanted[1] && layer.x.scalar_type() == at::kBFloat16 && has_exact_gradient(layer.weight);
  const int64_t size = rows_per_chunk(layer, may_be_whole);
  return for_each_chunk_of_logits(op, layer, wanted, grad_x, grad_bias, size, body);
}

/// All logits, as rows in the compute dtype, with torch's own ops. `product`: dtype of the matrix
/// product.
inline at::Tensor composite_logits(const LogitLayer& layer, at::ScalarType product) {
  const auto& [x, weight, bias, softcap, temperature, dtype] = layer;
  const at::ScalarType wide = compute_dtype(x.scalar_type());
  const bool adds = bias && bias->scalar_type() == product;
  const at::Tensor logits =
      as_matrix(at::linear(x.to(product), weight.to(product), adds ? bias : std::nullopt)).to(wide);
  return bias && !adds ? logits + bias->to(wide) : logits;
}

}  // namespace torchkiln
